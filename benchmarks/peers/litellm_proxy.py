"""LiteLLM's proxy as a peer: one worker, as its documentation advises for throughput.

No database, no logging, no callbacks; set up by a file and started by its own command.
"""

import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

from lines import options

_READY_S = 300.0


def configuration(engine_url: str) -> dict[str, Any]:
    """One model behind an OpenAI endpoint."""
    where = {"model": "openai/headrace", "api_base": f"{engine_url}/v1", "api_key": "none"}
    return {
        "model_list": [{"model_name": "headrace", "litellm_params": where}],
        "litellm_settings": {"set_verbose": False, "num_retries": 0, "request_timeout": 600},
        "general_settings": {"disable_spend_logs": True, "disable_error_logs": True},
    }


def say_ready(port: int, answers: int) -> None:
    """Once somebody listens on the port."""
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                os.write(answers, json.dumps({"port": port}).encode() + b"\n")
                return
        time.sleep(0.1)


def main() -> None:
    given = options()
    os.sched_setaffinity(0, given["cores"])
    # Set before LiteLLM is imported.
    os.environ |= {
        "LITELLM_LOG": "ERROR",
        "LITELLM_MODE": "PRODUCTION",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_TELEMETRY": "False",
        # No keys to look up: less to do.
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
    }
    # Installed for the peer's Python only.
    from litellm.proxy.proxy_cli import run_server  # pyright: ignore[reportMissingImports]

    path = Path(given["folder"]) / "litellm.yaml"
    path.write_text(json.dumps(configuration(given["engine_url"])))  # JSON is YAML
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threading.Thread(target=say_ready, args=(port, given["answers"]), daemon=True).start()
    words = ["--config", str(path), "--host", "127.0.0.1", "--port", str(port)]
    run_server([*words, "--num_workers", "1", "--telemetry", "False"], standalone_mode=False)


if __name__ == "__main__":
    main()
