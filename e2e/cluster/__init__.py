"""A real Kubernetes of one node on this machine, for tests: `python -m cluster up | down | status`.

The programs are the real ones, built from pinned Go modules. The whole node lives in its own
mount, process, network, host name, IPC and cgroup namespaces. To take it down, one process is
killed, and nothing of the node is left.

    host (10.240.0.1) ──veth── node (10.240.0.2): etcd, kube-apiserver, controller-manager,
                                │                 scheduler, kubelet, kube-proxy, containerd, policy
                                ├──veth── pod (10.244.0.x)
                                └──veth── pod (10.244.0.y)

The host reaches pods and Services. Pods reach the host, but nothing beyond it.
"""
