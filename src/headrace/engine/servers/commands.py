"""How to start inference servers so that their adapters can ask for everything they know.

Commands and variables only; `server_process` runs them.
"""

from collections.abc import Sequence
from pathlib import Path


def vllm_command(
    python: str,
    model: str | Path,
    port: int,
    *,
    dtype: str = "float32",
    max_context: int | None = None,
    max_running: int = 16,
    options: Sequence[str] = (),
) -> list[str]:
    """The command of a server that can do everything `VllmEngine` asks for.

    Args:
        python: interpreter that has vLLM.
        model: checkpoint directory.
        port: of the loopback interface.
        dtype: "float32" or "bfloat16".
        max_context: tokens of prompt + output; None takes the model's.
        max_running: requests decoded together.
        options: further ones.
    """
    command = [python, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", dtype, "--max-num-seqs", str(max_running)]
    command += [
        "--enable-scale-out",
        "--logprobs-mode",
        "processed_logprobs",
        "--max-logprobs",
        "21",
    ]
    command += ["--scheduling-policy", "priority", "--generation-config", "vllm"]
    command += ["--enable-prompt-tokens-details"]
    if max_context is not None:
        command += ["--max-model-len", str(max_context)]
    if not _has_tokenizer(model):
        command.append("--skip-tokenizer-init")
    return [*command, *options]


def vllm_environment(threads: int, cache_gb: int = 1) -> dict[str, str]:
    """Variables of such a server.

    Args:
        threads: compute threads on CPU.
        cache_gb: memory for keys and values on CPU.
    """
    return {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(cache_gb),
        # Threads go where the scheduler puts them: the machine is not the server's alone.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }


def sglang_command(
    python: str,
    model: str | Path,
    port: int,
    *,
    dtype: str = "float32",
    max_context: int | None = None,
    max_running: int = 16,
    options: Sequence[str] = (),
) -> list[str]:
    """The command of a server that can do everything `SglangEngine` asks for.

    Args:
        python: interpreter that has SGLang.
        model: checkpoint directory.
        port: of the loopback interface.
        dtype: "float32" or "bfloat16".
        max_context: tokens of prompt + output; None takes the model's.
        max_running: requests decoded together.
        options: further ones.
    """
    command = [python, "-m", "sglang.launch_server", "--model-path", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", dtype]
    command += ["--max-running-requests", str(max_running), "--enable-deterministic-inference"]
    if max_context is not None:
        command += ["--context-length", str(max_context)]
    if not _has_tokenizer(model):
        command.append("--skip-tokenizer-init")
    return [*command, *options]


def _has_tokenizer(model: str | Path) -> bool:
    return any((Path(model) / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))
