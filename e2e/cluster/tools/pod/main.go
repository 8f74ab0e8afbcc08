// Command pod is what the small images of the test cluster hold: the process that keeps a pod's
// namespaces open, a server that says its name, and clients that say what they saw. It is static
// and needs no file beside itself, because Debian's static busybox cannot look up a name.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"
)

const usage = `pod pause               wait for a signal, reap what others leave behind
pod serve PORT          answer every request with this pod's name
pod get URL             print what URL answers; exit code 1 after 3 seconds without an answer
pod beat URL            ask URL five times a second over one connection, print "ok" or "failed"
pod lookup NAME         print the addresses of NAME
`

const patience = 3 * time.Second

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	var err error
	switch command, argument := arguments(); {
	case command == "pause":
		pause(ctx)
	case command == "serve" && argument != "":
		err = serve(ctx, argument)
	case command == "get" && argument != "":
		err = get(ctx, argument)
	case command == "beat" && argument != "":
		beat(ctx, argument)
	case command == "lookup" && argument != "":
		err = lookup(ctx, argument)
	default:
		fmt.Fprint(os.Stderr, usage)
		os.Exit(2)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func arguments() (command, argument string) {
	words := append(os.Args[1:], "pause", "")
	if len(os.Args) == 2 {
		return words[0], ""
	}
	return words[0], words[1]
}

// pause is process 1 of a pod whose containers share one process namespace: orphans come to it.
func pause(ctx context.Context) {
	children := make(chan os.Signal, 1)
	signal.Notify(children, syscall.SIGCHLD)
	for {
		select {
		case <-ctx.Done():
			return
		case <-children:
			for {
				if pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); pid <= 0 || err != nil {
					break
				}
			}
		}
	}
}

func serve(ctx context.Context, port string) error {
	name, err := os.Hostname()
	if err != nil {
		return err
	}
	server := &http.Server{
		Addr: ":" + port,
		Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			fmt.Fprintln(w, name)
		}),
		ReadHeaderTimeout: patience,
	}
	context.AfterFunc(ctx, func() { server.Close() })
	fmt.Println("serving as", name, "on port", port)
	if err := server.ListenAndServe(); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

func get(ctx context.Context, url string) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	return ask(ctx, http.DefaultClient, url, os.Stdout)
}

// beat keeps its one connection for as long as it works, so that it shows what happens to a
// connection that was open before a NetworkPolicy came.
func beat(ctx context.Context, url string) {
	client := &http.Client{Transport: &http.Transport{MaxConnsPerHost: 1}}
	for ctx.Err() == nil {
		attempt, cancel := context.WithTimeout(ctx, patience)
		if err := ask(attempt, client, url, io.Discard); err != nil {
			fmt.Println("failed", err)
		} else {
			fmt.Println("ok")
		}
		cancel()
		time.Sleep(200 * time.Millisecond)
	}
}

func ask(ctx context.Context, client *http.Client, url string, out io.Writer) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	response, err := client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if _, err = io.Copy(out, response.Body); err != nil {
		return err
	}
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s answered %s", url, response.Status)
	}
	return nil
}

func lookup(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	addresses, err := net.DefaultResolver.LookupHost(ctx, name)
	for _, address := range addresses {
		fmt.Println(address)
	}
	return err
}
