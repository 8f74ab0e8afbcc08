"""`make cluster-demo`: from nothing to tokens on a real Kubernetes. It shows every command.

At the end, the cluster keeps running, so that you can look around.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import yaml

from cluster import binaries
from cluster.places import Places
from cluster.report import ClusterError, say
from cluster.session import Cluster, connect
from connecting import connected
from images.engine_image import engine_image, for_this_machine
from images.operator_image import operator_image
from models.tiny import model_path
from pdcluster_connector.compat.findings import counted

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "tiny-cpu.yaml"
CHART = ROOT / "charts" / "pdcluster"
SYSTEM_NAMESPACE, NAME = "pdcluster-system", "tiny"
START_SECONDS = 600
PROMPT = "A prompt whose KV cache is computed in one pod and decoded in another: once upon a time"


class Demo:
    """Runs commands as a person would type them, and shows them so."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._programs = {
            "kubectl": cluster.programs["kubectl"],
            "helm": cluster.helm(4),
        }

    def command(self, line: str, stdin: str = "") -> None:
        """Show a command and its output. Of a pipe, only the last command runs, with ``stdin``."""
        print(f"\n$ {line}", flush=True)
        program, *arguments = line.partition(" | ")[2].split() or line.split()
        done = subprocess.run(
            [self._programs[program], *arguments],
            cwd=ROOT,
            env={"KUBECONFIG": str(self._cluster.kubeconfig), "HOME": str(Path.home())},
            input=stdin,
            text=True,
            check=False,
        )
        if done.returncode:
            raise ClusterError(f"`{line}` ended with exit code {done.returncode}")

    def read(self, *words: str) -> str:
        return self._cluster.kubectl(*words)

    def wait(self) -> None:
        """Show what it is waiting for until the PDCluster is Ready, like `kubectl wait`."""
        print(f"\n$ kubectl wait --for=condition=Ready pdc/{NAME}", flush=True)
        started, shown = time.monotonic(), ""
        while time.monotonic() - started < START_SECONDS:
            document = json.loads(self.read("get", "pdc", NAME, "--output=json"))
            conditions = document.get("status", {}).get("conditions", [])
            for ready in (c for c in conditions if c["type"] == "Ready"):
                text = f"{ready['reason']}: {ready['message']}"
                if text != shown:
                    print(f"  {time.monotonic() - started:5.1f} s  {text}", flush=True)
                    shown = text
                if ready["status"] == "True":
                    return
            time.sleep(0.5)
        raise ClusterError(f"it is not Ready after {START_SECONDS} s: kubectl describe pdc {NAME}")

    def complete(self, prompt: str) -> None:
        """Send one prompt to the router's Service. This machine has a route to it."""
        service = json.loads(self.read("get", "service", f"{NAME}-router", "--output=json"))
        address, port = service["spec"]["clusterIP"], service["spec"]["ports"][0]["port"]
        body = {"model": NAME, "prompt": prompt, "max_tokens": 32, "temperature": 0}
        text = json.dumps(body)
        print(f"\n$ curl http://{address}:{port}/v1/completions -d '{text}'", flush=True)
        connection = connected(address, port, 120)
        connection.request("POST", "/v1/completions", text, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        said = answer.read().decode(errors="replace")
        if answer.status != 200:
            raise ClusterError(f"the router answers {answer.status}: {said[:500]}")
        document = json.loads(said)
        print(document["choices"][0]["text"])
        path = (document.get("kv_transfer_params") or {}).get("kv_path") or {}
        if path.get("outcome") != "transferred":
            raise ClusterError(f"no KV was moved for this prompt: {path}")
        print(
            f"KV path: {counted(path['blocks'], 'block')}, "
            f"{path['bytes']:,} bytes in {path['seconds'] * 1e3:.1f} ms"
        )


def demonstrate(prompt: str) -> None:
    # Build and start first. The demo itself begins after these slow steps.
    binaries.provide(binaries.HELM_PROGRAMS, Places.of_user())
    image, engines, model = operator_image(), engine_image(), model_path("llama")
    cluster = connect()
    say("  importing the images of the operator and of the engines")
    for one in (image, engines):
        cluster.load(one.archive)
    demo = Demo(cluster)
    demo.command(
        f"helm upgrade --install pdcluster {CHART.relative_to(ROOT)}"
        f" --namespace {SYSTEM_NAMESPACE} --create-namespace --wait"
        f" --set image.repository={image.repository},image.tag={image.tag}"
        " --set operator.allowHostPathModels=true,webhook.replicas=1"
    )
    document = for_this_machine(yaml.safe_load(EXAMPLE.read_text()), model)
    manifest = f"python -m images manifest {EXAMPLE.relative_to(ROOT)} {model}"
    demo.command(f"{manifest} | kubectl apply --filename -", stdin=json.dumps(document))
    demo.wait()
    demo.complete(prompt)
    demo.command(f"kubectl get pdc {NAME} --output wide")
    demo.command("kubectl get pods --output wide")
    demo.command("kubectl explain pdc.spec.prefill")
    demo.command(f"kubectl describe pdc {NAME}")
    print(f"\nLook around: export KUBECONFIG={cluster.kubeconfig}")
    print(f"             export PATH={cluster.places.links}:$PATH")
    print("End it:      make cluster-down")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m cluster_demo", description=__doc__)
    parser.add_argument("prompt", nargs="?", default=PROMPT)
    try:
        demonstrate(parser.parse_args().prompt)
    except ClusterError as error:
        say(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
