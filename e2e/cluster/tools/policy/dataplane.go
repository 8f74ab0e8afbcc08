package main

import (
	"context"
	"fmt"
	"log"
	"time"

	"github.com/florianl/go-nfqueue/v2"
	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/xt"
)

const (
	table = "network-policy"
	queue = 100
	// A verdict needs addresses and ports: the longest IPv4 header and a TCP header.
	headerBytes = 128
	// From linux/netfilter/nf_conntrack_common.h.
	directionReply = 1
)

// dataplane sends packets to a judge and remembers per connection which generation of the policies
// allowed it: the connection's conntrack mark. A new generation makes the kernel ask again, once a
// connection, so that a policy also ends what was open before it came.
//
//	hook forward, priority filter      hook forward, priority filter + 1
//	  ct direction reply  accept         ct mark set GENERATION
//	  ct state related    accept       (reached only by packets that the judge let pass)
//	  ct mark GENERATION  accept
//	  NFQUEUE
//
// Answers are not judged: without its own packets a connection stops anyway.
type dataplane struct {
	kernel     *nftables.Conn
	queue      *nfqueue.Nfqueue
	table      *nftables.Table
	judge      *nftables.Chain
	remember   *nftables.Chain
	generation uint32
}

func openDataplane(ctx context.Context, allow func(packet []byte) bool) (*dataplane, error) {
	packets, err := nfqueue.Open(&nfqueue.Config{
		NfQueue:      queue,
		MaxPacketLen: headerBytes,
		MaxQueueLen:  1024,
		Copymode:     nfqueue.NfQnlCopyPacket,
		Flags:        nfqueue.NfQaCfgFlagGSO,
		WriteTimeout: 100 * time.Millisecond,
	})
	if err != nil {
		return nil, fmt.Errorf("netfilter queue: %w", err)
	}
	err = packets.RegisterWithErrorFunc(ctx, func(packet nfqueue.Attribute) int {
		verdict := nfqueue.NfDrop
		if packet.Payload != nil && allow(*packet.Payload) {
			verdict = nfqueue.NfAccept
		}
		if err := packets.SetVerdict(*packet.PacketID, verdict); err != nil {
			log.Printf("verdict: %v", err)
		}
		return 0
	}, func(err error) int {
		if ctx.Err() == nil {
			log.Printf("netfilter queue: %v", err)
		}
		return 0
	})
	if err != nil {
		return nil, fmt.Errorf("netfilter queue: %w", err)
	}
	kernel, err := nftables.New()
	if err != nil {
		return nil, fmt.Errorf("nftables: %w", err)
	}
	d := &dataplane{kernel: kernel, queue: packets}
	d.table = &nftables.Table{Name: table, Family: nftables.TableFamilyIPv4}
	// Add, delete, add: an earlier run's table goes, and its absence is no error.
	kernel.AddTable(d.table)
	kernel.DelTable(d.table)
	kernel.AddTable(d.table)
	d.judge = d.addChain("judge", *nftables.ChainPriorityFilter)
	d.remember = d.addChain("remember", *nftables.ChainPriorityFilter+1)
	return d, d.judgeAnew()
}

func (d *dataplane) addChain(name string, priority nftables.ChainPriority) *nftables.Chain {
	return d.kernel.AddChain(&nftables.Chain{
		Name: name, Table: d.table, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookForward, Priority: &priority,
	})
}

// judgeAnew begins a generation. Rules are replaced in one transaction and chains stay: a chain
// that goes takes the packets with it that wait for a verdict.
func (d *dataplane) judgeAnew() error {
	d.generation++
	generation := binaryutil.NativeEndian.PutUint32(d.generation)
	d.kernel.FlushChain(d.judge)
	d.kernel.FlushChain(d.remember)
	d.addRule(d.judge,
		&expr.Ct{Register: 1, Key: expr.CtKeyDIRECTION},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{directionReply}},
		&expr.Verdict{Kind: expr.VerdictAccept})
	d.addRule(d.judge,
		&expr.Ct{Register: 1, Key: expr.CtKeySTATE},
		&expr.Bitwise{
			SourceRegister: 1, DestRegister: 1, Len: 4,
			Mask: binaryutil.NativeEndian.PutUint32(expr.CtStateBitRELATED), Xor: make([]byte, 4),
		},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: make([]byte, 4)},
		&expr.Verdict{Kind: expr.VerdictAccept})
	d.addRule(d.judge,
		&expr.Ct{Register: 1, Key: expr.CtKeyMARK},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: generation},
		&expr.Verdict{Kind: expr.VerdictAccept})
	// The xtables target through nft's compatibility layer: struct xt_NFQ_info_v3 holds the
	// queue's number, the number of queues and flags, each of 16 bits.
	target := xt.Unknown(append(append(binaryutil.NativeEndian.PutUint16(queue),
		binaryutil.NativeEndian.PutUint16(1)...), 0, 0, 0, 0))
	d.addRule(d.judge, &expr.Target{Name: "NFQUEUE", Rev: 3, Info: &target})
	d.addRule(d.remember,
		&expr.Immediate{Register: 1, Data: generation},
		&expr.Ct{Register: 1, SourceRegister: true, Key: expr.CtKeyMARK})
	if err := d.kernel.Flush(); err != nil {
		return fmt.Errorf("nftables: %w", err)
	}
	return nil
}

func (d *dataplane) addRule(chain *nftables.Chain, expressions ...expr.Any) {
	d.kernel.AddRule(&nftables.Rule{Table: d.table, Chain: chain, Exprs: expressions})
}

func (d *dataplane) close() {
	d.kernel.DelTable(d.table)
	if err := d.kernel.Flush(); err != nil {
		log.Printf("nftables: %v", err)
	}
	d.queue.Close()
}
