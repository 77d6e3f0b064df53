"""What operators run: secrets for a cluster, and the manifests for Kubernetes."""
