"""vLLM as a peer: its engine in one process, compiled, with prefix cache.

`run` is timed; `generate` returns what was sampled with its logprobs.
"""

import os
import time
from typing import Any

from lines import expect, options, serve, waves


def main() -> None:
    given = options()
    # Set before vLLM is imported. Its engine in this process: a second one would need a core.
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": given["cores"],
        "OMP_NUM_THREADS": str(given["threads"]),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    # Installed for the peer's Python only.
    from vllm import (  # pyright: ignore[reportMissingImports]
        LLM,
        SamplingParams,
    )

    model = LLM(
        given["model"],
        skip_tokenizer_init=True,
        dtype=given["dtype"],
        max_model_len=given["max_context"],
        max_num_seqs=given["max_running"],
        enable_prefix_caching=True,
        enforce_eager=given.get("eager", False),
        seed=0,
    )

    def finished(prompts: list[list[int]], sampling: Any) -> Any:
        ids = [{"prompt_token_ids": prompt} for prompt in prompts]
        return model.generate(ids, sampling, use_tqdm=False)

    def run(prompts: list[list[int]], new: int, concurrency: int, seed: int) -> dict[str, Any]:
        sampling = SamplingParams(
            temperature=1.0, max_tokens=new, ignore_eos=True, detokenize=False
        )
        sampled = 0
        began = time.perf_counter()
        for wave in waves(prompts, concurrency):
            for result in finished(wave, sampling):
                sampled += len(result.outputs[0].token_ids)
        seconds = time.perf_counter() - began
        expect(sampled, new * len(prompts))
        return {"seconds": seconds}

    def generate(
        prompts: list[list[int]], new: int, seeds: list[int], stop_ids: list[int]
    ) -> dict[str, Any]:
        sampling = [
            SamplingParams(
                temperature=1.0,
                max_tokens=new,
                seed=seed,
                stop_token_ids=stop_ids,
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
            )
            for seed in seeds
        ]
        outputs = []
        for result in finished(prompts, sampling):
            ids = list(result.outputs[0].token_ids)
            found = zip(ids, result.outputs[0].logprobs, strict=True)
            outputs.append({"ids": ids, "logprobs": [entry[i].logprob for i, entry in found]})
        return {"outputs": outputs}

    serve(given, {"run": run, "generate": generate})


if __name__ == "__main__":
    main()
