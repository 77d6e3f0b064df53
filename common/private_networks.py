"""The networks that no user's URL may lead into, unless the operator lists them: `outgoing.py`, and the proxy of the containers.

A module of its own without imports, because the proxy's image has no other.
"""

PRIVATE = (
    *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24"),
    *("192.168.0.0/16", "198.18.0.0/15", "224.0.0.0/3", "fc00::/7", "fe80::/10", "fec0::/10", "ff00::/8"),
    *("::/96", "64:ff9b::/96", "64:ff9b:1::/48", "2002::/16"),  # a gateway may lead from these to any IPv4 address
)
