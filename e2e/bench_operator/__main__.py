"""`make bench-operator`: many PDClusters on one operator, measured, and held against thresholds."""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from operator_runs import Operator
from real_api import RealApi

from bench_operator import account, measure, peer, plan_at_rest
from bench_operator.anchor import MOST_CLUSTERS, Anchor
from bench_operator.bad_days import BadDays
from bench_operator.flame_graph import recorded
from bench_operator.plane import BENCH, CRDS, DOOMED, SAMPLE, running_plane
from bench_operator.thresholds import missed, missed_on
from pdcluster_operator.adapters.api_server.client import KubeClient
from pdcluster_operator.adapters.api_server.kubeconfig import find_configuration

SAMPLE_NAME = "some-sample"
AUTHORITY_SECRET = "default/engine-authority"
REST_SECONDS = 300.0
"""So long that each of the rare comparisons with the whole API server falls into it once."""
SETTLE_SECONDS = 20.0
"""By then a process that has started again has looked at each PDCluster, and may write."""
LONGEST = 3600.0
"""Seconds that one number of PDClusters may take to become Ready, or to come to rest."""


def say(text: str) -> None:
    """Tell a person how far it is."""
    print(f"bench-operator: {time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


async def run(
    real: RealApi,
    count: int,
    checkout: Path | None,
    *,
    bad_days: bool,
    tls: bool,
    flame_graph: Path | None = None,
) -> dict[str, Any]:
    """Return everything that is measured with ``count`` PDClusters."""
    watched = (SAMPLE, BENCH, DOOMED) if bad_days else (SAMPLE, BENCH)
    namespaces = [f"--namespace={name}" for name in watched]
    more = [f"--authority-secret={AUTHORITY_SECRET}"] if tls else []
    operator = Operator(real, "run", *namespaces, "--allow-host-path-models", *more)
    if checkout is not None:
        for part in ("operator", "connector"):
            operator.bring(checkout / part / "src")
    engines = measure.DecodeEngines()
    compared = min(count, MOST_CLUSTERS)
    configuration = await find_configuration(str(real.folder / "admin.kubeconfig"))
    async with KubeClient(configuration) as client:
        try:
            operator.start()
            await _sample(client, real, tls=tls)
            anchor = Anchor(real, SAMPLE_NAME)
            say(f"a cluster has {anchor.children} children; the anchor, first half")
            raw = [await anchor.objects_per_second(client, compared // 2)]
            await anchor.until_settled(client)
            say(f"raw: {raw[0]:.0f} objects/s; {count} PDClusters")
            assert operator.process is not None
            with recorded(operator.process.pid, flame_graph):
                found = await _create(client, real, operator, anchor.children, count, tls=tls)
            say(f"created: {found}; the anchor, second half")
            raw.append(await anchor.objects_per_second(client, compared - compared // 2))
            await anchor.until_settled(client)
            found["raw_objects_per_second"] = [round(one, 1) for one in raw]
            mean = 2 / (1 / raw[0] + 1 / raw[1])
            found["share_of_raw_objects"] = round(found["objects_per_second"] / mean, 2)
            share = found["clusters_per_second"] * anchor.children / mean
            found["share_of_raw_clusters"] = round(share, 2)
            say(f"at rest for {REST_SECONDS:.0f} s: {found}")
            found["rest"] = await measure.rest(real, operator, REST_SECONDS)
            found["rss_megabytes"], found["rss_peak_megabytes"] = map(
                round, measure.memory(operator)
            )
            say("changes")
            found["reaction_seconds"] = await measure.reactions(
                real.folder, client, BENCH, count, engines
            )
            await measure.until_quiet(real, LONGEST)
            say("starting again")
            found["restart"] = await _restart(real, operator)
            if bad_days:
                say("bad days")
                found["bad_days"] = await BadDays(
                    real, operator, client, count, engines, tls=tls
                ).run(say)
        except Exception:
            say(f"the end of the operator's log:\n{operator.said()}")
            raise
        finally:
            operator.stop()
    return found


async def _sample(client: KubeClient, real: RealApi, *, tls: bool) -> None:
    path = f"/apis/pdcluster.dev/v1alpha1/namespaces/{SAMPLE}/pdclusters"
    await client.call("POST", path, body=measure.pdcluster(SAMPLE_NAME, tls=tls))
    await measure.until_ready(real.folder, SAMPLE, 1, LONGEST)
    await measure.until_quiet(real, LONGEST)


async def _create(
    client: KubeClient,
    real: RealApi,
    operator: Operator,
    children: int,
    count: int,
    *,
    tls: bool,
) -> dict[str, Any]:
    seen, read = real.written, measure.reads(operator)
    cpu, began = measure.used(operator), time.time()
    await measure.create(client, BENCH, count, tls=tls)
    await measure.until_ready(real.folder, BENCH, count, LONGEST)
    ready = time.time() - began
    await measure.until_quiet(real, LONGEST)
    cpu = measure.used(operator) - cpu
    lines = account.of_operator(real.writes(seen), BENCH)
    written = [line for line in lines if account.is_child(line) and not account.is_dry_run(line)]
    first, last = account.span(written)
    after = measure.reads(operator)
    gets = {name: number - read.get(name, 0) for name, number in after.items()}
    kept = [line for line in lines if line["objectRef"]["resource"] != "leases"]
    writes = account.by_resource(line for line in kept if not account.is_dry_run(line))
    return {
        "pdclusters": count,
        "tls": tls,
        "children": children,
        "objects_per_second": round(children * count / (last - first), 1),
        "clusters_per_second": round(count / (last - began), 2),
        "seconds_until_all_are_ready": round(ready, 1),
        "reads_of_one": round(sum(gets.values()) / count, 2),
        "reads": {name: number for name, number in gets.items() if number},
        "writes_of_one": round(sum(writes.values()) / count, 2),
        "writes": writes,
        "processor_milliseconds_of_one": round(1000 * cpu / count),
    }


async def _restart(real: RealApi, operator: Operator) -> dict[str, Any]:
    operator.kill()
    seen, began = real.written, time.monotonic()
    operator.start(seconds=LONGEST)
    listed = time.monotonic() - began
    await asyncio.sleep(SETTLE_SECONDS)
    await measure.until_quiet(real, LONGEST)
    lines = real.writes(seen)
    now, peak = measure.memory(operator)
    return {
        "seconds_until_listed": round(listed, 1),
        "rss_megabytes": round(now),
        "rss_peak_megabytes": round(peak),
        "writes": account.by_resource(
            line for line in lines if line["user"]["username"] == "operator"
        ),
    }


def _commit(checkout: Path | None) -> str:
    """Return the commit that was measured; with ``-dirty`` if files differ from it."""
    command = ("git", "describe", "--always", "--dirty", "--exclude=*")
    folder = checkout or Path(__file__).parent
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def main() -> int:
    """Print the numbers as JSON; return 1 if a threshold is missed."""
    parser = argparse.ArgumentParser(prog="make bench-operator", description=__doc__)
    parser.add_argument("--pdclusters", type=int, nargs="+", default=[100], metavar="N")
    parser.add_argument(
        "--checkout", type=Path, help="folder with an older version of this repository to measure"
    )
    parser.add_argument(
        "--bad-days", action="store_true", help="break things afterwards, and look what happens"
    )
    parser.add_argument(
        "--tls", action="store_true", help="with TLS, as is the default of a PDCluster"
    )
    parser.add_argument("--peer", action="store_true", help="run LWS' DisaggregatedSets beside")
    parser.add_argument("--output", type=Path, help="file that gets the numbers, one line a number")
    parser.add_argument(
        "--flame-graph",
        type=Path,
        metavar="SVG",
        help="file that shows where the operator's time goes while it creates; needs py-spy",
    )
    options = parser.parse_args()
    crds = CRDS if options.checkout is None else options.checkout / "crds"
    late = []
    for count in options.pdclusters:
        with running_plane(crds, tls=options.tls) as real:
            found = asyncio.run(
                run(
                    real,
                    count,
                    options.checkout,
                    bad_days=options.bad_days,
                    tls=options.tls,
                    flame_graph=options.flame_graph,
                )
            )
        found["plan_at_rest"] = plan_at_rest.measured(options.checkout)
        found["commit"], found["date"] = _commit(options.checkout), time.strftime("%Y-%m-%d")
        print(json.dumps(found, indent=2), flush=True)
        if options.peer:
            with running_plane() as real:
                beside = asyncio.run(peer.run(real, count))
            print(json.dumps(beside, indent=2), flush=True)
            found["peer"] = beside
        if options.output is not None:
            with options.output.open("a") as file:
                file.write(json.dumps(found) + "\n")
        late += missed(found) + (missed_on(found["bad_days"]) if options.bad_days else [])
    for line in late:
        say(line)
    return int(bool(late))


if __name__ == "__main__":
    sys.exit(main())
