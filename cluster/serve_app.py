"""The application as Ray Serve imports it: what `serve deploy` and KubeRay's RayService name as `import_path`.

Its arguments are the settings of `kvorum serve --config FILE`. Ports, proxies and the nodes' environment are not the
application's to choose: the Helm chart sets them, with the values of `launcher.serve_environment`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve

from kvorum.cluster.app import build_app
from kvorum.cluster.config_flags import check_config


def build(args: Mapping[str, Any]) -> serve.Application:
    """Lay out routers and engines from settings by name; raises ConfigError, which Serve shows as the reason.

    An engine counts as started once its model is loaded: an update waits for it before the next old engine stops, and
    the application runs when it can answer.
    """
    return build_app(check_config(args, {}), replaces_another=True)
