module pdcluster.dev/e2e/cluster/tools/pod

go 1.26.0
