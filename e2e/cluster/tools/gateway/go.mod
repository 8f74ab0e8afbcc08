module pdcluster.dev/e2e/cluster/tools/gateway

go 1.26.0

require (
	sigs.k8s.io/gateway-api v1.5.1
	sigs.k8s.io/gateway-api-inference-extension v1.5.0
)
