"""What is set about a server on Ray is done, or refused by name; Ray itself is not needed for that."""

from __future__ import annotations

from typing import Any

import pytest

from quire.cluster.settings import RaySettings
from quire.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("server", "why"),
    [
        ({"http_workers": 2}, "server.http_workers: is not done on Ray: .* load balancer"),
        ({"http_workers": 1}, "server.http_workers: is not done on Ray"),
        ({"store": "/tmp/x"}, "server.store: is not done on Ray: .* memory"),
        ({"batches": "/tmp/x"}, "server.batches: is not done on Ray: .* `quire batch --ray`"),
        ({"max_batch_bytes": 5}, "server.max_batch_bytes: is not done on Ray"),
        ({"port": 80}, "server.port: is not set here"),
        ({"no_such": 80}, "server.no_such: is no option"),
        ({"stall_seconds": -1}, "stall_seconds: must be above 0"),
    ],
)
def test_options_of_the_server_that_ray_does_not_do_are_refused(
    server: dict[str, Any], why: str
) -> None:
    with pytest.raises(InvalidRequestError, match=why):
        RaySettings(server=server)


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({"http_node": "tail"}, "http_node: must be one of head, any, not 'tail'"),
        ({"max_replicas": "many"}, "max_replicas: must be a number, not 'many'"),
        ({"max_replicas": None}, "max_replicas: must be a number"),
        ({"http_cpus": "nan"}, "http_cpus"),
        ({"http_cpus": "-1"}, "http_cpus"),
        ({"schedule_seconds": "inf"}, "schedule_seconds"),
        ({"replicas": 2}, "replicas: is no setting; there are: model"),
        (
            {"gpus_per_replica": 2},
            "gpus_per_replica: is 2, but the engine's tensor_parallel_size is 1",
        ),
        ({"gpus_per_replica": -2}, "gpus_per_replica"),
        ({"min_replicas": 3}, "replicas"),
    ],
)
def test_settings_that_are_wrong_are_refused_by_name(args: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why):
        RaySettings.of(args)
