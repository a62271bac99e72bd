"""What an unmodified agent did with a real model trains it: from its requests to a trainer's step.

Runs where HEADRACE_MINI_SWE_AGENT_PYTHON names an interpreter that has mini-swe-agent and the
SmolLM2 checkpoint is in its cache (`-m slow`).
"""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from agent_rig import installed, run_program, with_path

from headrace.engine.config import EngineConfig
from headrace.engine.core import EngineCore
from headrace.engine.local import LocalEngine
from headrace.gateway.gateway import Gateway
from headrace.gateway.server import GatewayServer
from headrace.model.checkpoint import load_checkpoint
from headrace.rollout.segments import accounting, segments
from headrace.rollout.types import Outcome, Session
from headrace.serving import client_settings
from headrace.tokens.renderer import create_renderer
from headrace.training.batch import rollout_sample
from headrace.training.trainer import OptimizerConfig, RlConfig, Trainer

PYTHON = installed("HEADRACE_MINI_SWE_AGENT_PYTHON")
CHECKPOINT = Path.home() / ".cache" / "headrace" / "smollm2-135m-instruct"
TASK = "Print hello with one bash command."

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        PYTHON is None or not CHECKPOINT.is_dir(),
        reason="HEADRACE_MINI_SWE_AGENT_PYTHON or SmolLM2 is missing",
    ),
]


@pytest.fixture
async def server() -> AsyncIterator[GatewayServer]:
    core = EngineCore(
        load_checkpoint(CHECKPOINT), EngineConfig(max_running=2, max_context=4096, seed=1)
    )
    engine = LocalEngine(core)
    gateway = Gateway(engine, create_renderer("auto", CHECKPOINT), model="smollm2")
    server = await GatewayServer.start(gateway)
    yield server
    await server.stop()
    await engine.close()


async def test_an_agents_session_trains_its_model(server: GatewayServer, tmp_path: Path) -> None:
    """Every token sampled for it is trained once, at the logprob that it was sampled with."""
    assert PYTHON is not None
    torch.set_num_threads(1)
    key = server.gateway.open_session("s", seed=1)
    words = client_settings(server.base_url, key, "smollm2")["mini-swe-agent"]
    options = (
        "--yolo --exit-immediately -o trajectory.json -c mini.yaml -c agent.step_limit=3 "
        f"-c model.model_kwargs.max_tokens=48 -t '{TASK}'"
    )
    environment = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", **with_path(PYTHON.parent)}
    await run_program(["sh", "-c", f"{words} {options}"], folder=tmp_path, environment=environment)
    calls = await server.gateway.close_session("s")
    assert len(calls) >= 2
    assert not [name for name in server.gateway.counters if name.startswith("error.")]

    session = Session("s", "rl", "train", "t", {}, "g", Outcome.OK, calls=calls)
    account = accounting(session)
    assert account.sampled == account.trainable > 0
    trainer = Trainer(load_checkpoint(CHECKPOINT), OptimizerConfig(1e-5))
    metrics = trainer.rl_step(
        [rollout_sample(segment, advantage=1.0) for segment in segments(session)],
        RlConfig(0.2, 0.28),
        version=0,
        fresh=True,
    )
    assert metrics["trained_tokens"] == account.sampled
    assert metrics["mismatch_max_abs"] < 1e-3
    assert metrics["grad_norm"] > 0
    assert not metrics["skipped"]
