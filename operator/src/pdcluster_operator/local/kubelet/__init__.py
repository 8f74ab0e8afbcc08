"""A foreground mini-kubelet: the pods of the in-memory API become processes of this machine.

It has at most 400 lines of code, which a test counts. The container runtime (:mod:`..shim`), the
network plugin (:mod:`..addresses`) and the volumes are no part of it, as in a cluster.

Three substitutions stand for what a real node does with namespaces: a mount becomes a
folder, a DNS name becomes its pod's address, and a bind to 0.0.0.0 becomes a bind to the
pod's own 127.x.y.z. Everything else in a container's arguments and environment is what a
cluster would give it.
"""
