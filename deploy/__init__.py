"""Tools of operators: secrets for a cluster, and the manifests for Kubernetes."""
