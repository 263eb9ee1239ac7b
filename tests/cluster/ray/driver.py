"""Deploys replicas as told by lines of JSON on standard input, so that Ray stays out of the tests'
process.

{"deploy": settings} -> {"up": seconds}       a first deployment, or a replacement of it
{"where": true}      -> {"where": {name: process}}
"""

import json
import sys
import time
from typing import Any


def main() -> None:
    import ray
    from ray import serve

    from ragkv.api import ServeConfig
    from ragkv.cluster.ray.ray_app import NAME, build

    # on a busy machine Ray's processes may start more slowly than it waits
    for patience in range(3, 0, -1):
        try:
            ray.init(
                num_cpus=4,
                object_store_memory=100_000_000,
                include_dashboard=False,
                logging_level="error",
            )
            break
        except Exception:
            ray.shutdown()
            if patience == 1:
                raise
    first = json.loads(sys.stdin.readline())["deploy"]
    serve.start(http_options={"host": "127.0.0.1", "port": first["serve"]["port"]})
    deploy(first, serve, ServeConfig, build, NAME)
    for line in sys.stdin:
        request = json.loads(line)
        if "deploy" in request:
            deploy(request["deploy"], serve, ServeConfig, build, NAME)
        else:
            replicas = serve.get_deployment_handle("replica", NAME)
            try:
                say({"where": dict(replicas.broadcast("process").results(timeout_s=30))})
            # a replica that was killed, and that Ray Serve still counts
            except ray.exceptions.RayActorError:
                say({"where": {}})
    serve.shutdown()
    ray.shutdown()


def deploy(settings: dict[str, Any], serve: Any, config: Any, build: Any, name: str) -> None:
    began = time.monotonic()
    serve.run(build(config.gather(flags=settings)), name=name, route_prefix="/")
    say({"up": time.monotonic() - began})


def say(value: dict[str, Any]) -> None:
    print("driver:" + json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
