"""A real Kubernetes of one node on this machine, for tests: `python -m cluster up | down | status`.

The programs are the real ones, built from pinned Go modules. The whole node lives in its own
mount, process, network, host name, IPC and cgroup namespaces, so that taking it down is killing
one process, and nothing of it stays behind.

    host (10.240.0.1) ──veth── node (10.240.0.2): etcd, kube-apiserver, controller-manager,
                                │                 scheduler, kubelet, kube-proxy, containerd, policy
                                ├──veth── pod (10.244.0.x)
                                └──veth── pod (10.244.0.y)

Pods and Services are reachable from the host; pods reach the host, and nothing beyond it.
"""
