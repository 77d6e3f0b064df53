"""Tools of operators.

Its files:

    install.py            installs the packages into .venv
    install_vllm.py       installs vLLM into it, for CUDA or for a CPU
    make_secrets.py       makes the secrets of a cluster
    acl.py                makes Redis' users, one a service, with the rights that it needs
    compile_proto.py      compiles the messages of the Tinker protocol
    docker/               the images of the cluster, and what they start
    kubernetes/           the manifests; beside it variants: kubernetes-download/, kubernetes-gpu/, kubernetes-gpu-ranks/,
                          kubernetes-nodes/
"""
