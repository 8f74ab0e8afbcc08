// Command policy enforces the NetworkPolicies of this node's pods.
//
// What a policy means is decided by sigs.k8s.io/kube-network-policies. Its own data plane needs
// CONFIG_NFT_QUEUE, which small virtual machines' kernels leave out; the one in dataplane.go needs
// only what iptables needed. Judged is what the node forwards from or to a pod over IPv4: traffic
// between a pod and the node itself (probes, webhooks called by the API server) is not.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"os"
	"os/signal"
	"reflect"
	"sync/atomic"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/kube-network-policies/pkg/api"
	"sigs.k8s.io/kube-network-policies/pkg/network"
	"sigs.k8s.io/kube-network-policies/pkg/networkpolicy"
	"sigs.k8s.io/kube-network-policies/pkg/podinfo"
)

// How long a change may wait for the next. Judging everything anew costs one packet a connection.
const settle = 100 * time.Millisecond

func main() {
	kubeconfig := flag.String("kubeconfig", "", "how to reach the API server")
	node := flag.String("node", "", "name of this node")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if err := run(ctx, *kubeconfig, *node); err != nil {
		log.Print(err)
		os.Exit(1)
	}
}

func run(ctx context.Context, kubeconfig, node string) error {
	var changed atomic.Bool
	engine, err := watchPolicies(ctx, kubeconfig, node, func() { changed.Store(true) })
	if err != nil {
		return err
	}
	plane, err := openDataplane(ctx, func(packet []byte) bool { return allowed(ctx, engine, packet) })
	if err != nil {
		return err
	}
	defer plane.close()
	log.Print("enforcing")
	tick := time.NewTicker(settle)
	defer tick.Stop()
	again := false
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			// Once more a tick later: a packet that was judged by the old rules may have been
			// on its way back to the kernel while the new generation began.
			now := changed.Swap(false)
			if now || again {
				if err := plane.judgeAnew(); err != nil {
					return err
				}
			}
			again = now
		}
	}
}

func allowed(ctx context.Context, engine *networkpolicy.PolicyEngine, bytes []byte) bool {
	packet, err := network.ParsePacket(bytes)
	if err != nil {
		log.Printf("drop: %v", err)
		return false
	}
	// A policy that cannot be evaluated must not open a door.
	ok, err := engine.EvaluatePacket(ctx, &packet)
	if err != nil || !ok {
		log.Printf("drop %s %s:%d -> %s:%d %v", packet.Proto, packet.SrcIP, packet.SrcPort,
			packet.DstIP, packet.DstPort, err)
		return false
	}
	return true
}

// watchPolicies returns when pods, namespaces and policies are known, and calls onChange whenever
// one changes in a way that may change a verdict.
func watchPolicies(
	ctx context.Context, kubeconfig, node string, onChange func(),
) (*networkpolicy.PolicyEngine, error) {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return nil, err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	factory := informers.NewSharedInformerFactory(client, 0)
	pods, namespaces := factory.Core().V1().Pods(), factory.Core().V1().Namespaces()
	policies := factory.Networking().V1().NetworkPolicies()
	resolver, err := podinfo.NewInformerResolver(pods.Informer())
	if err != nil {
		return nil, err
	}
	evaluator := networkpolicy.NewStandardNetworkPolicy(node, namespaces, pods, policies)
	provider := podinfo.NewInformerProvider(pods, namespaces, nil, []podinfo.IPResolver{resolver})
	engine := networkpolicy.NewPolicyEngine(provider, []api.PolicyEvaluator{evaluator})
	for _, informer := range []cache.SharedIndexInformer{
		pods.Informer(), namespaces.Informer(), policies.Informer(),
	} {
		if _, err := informer.AddEventHandler(changes(onChange)); err != nil {
			return nil, err
		}
	}
	factory.Start(ctx.Done())
	for kind, ok := range factory.WaitForCacheSync(ctx.Done()) {
		if !ok {
			return nil, fmt.Errorf("%v could not be listed", kind)
		}
	}
	return engine, nil
}

func changes(onChange func()) cache.ResourceEventHandler {
	return cache.ResourceEventHandlerFuncs{
		AddFunc:    func(any) { onChange() },
		DeleteFunc: func(any) { onChange() },
		UpdateFunc: func(before, after any) {
			if !reflect.DeepEqual(matters(before), matters(after)) {
				onChange()
			}
		},
	}
}

// matters holds what a verdict can depend on: a pod's labels, addresses and phase (a finished pod's
// address may be another's), a namespace's labels, a policy's generation.
func matters(object any) any {
	if pod, ok := object.(*corev1.Pod); ok {
		return []any{pod.Labels, pod.Status.PodIPs, pod.Status.Phase}
	}
	about, err := meta.Accessor(object)
	if err != nil {
		return object
	}
	return []any{about.GetLabels(), about.GetGeneration()}
}
