"""transformers' `generate` as a peer: a static batch, sampled at temperature 1."""

import time
from typing import Any

import torch
from lines import expect, options, serve, waves
from transformers import AutoModelForCausalLM


@torch.inference_mode()
def main() -> None:
    given = options()
    torch.set_num_threads(given["threads"])
    model: Any = AutoModelForCausalLM.from_pretrained(
        given["model"], dtype=getattr(torch, given["dtype"])
    ).eval()
    model.generation_config.eos_token_id = None

    def run(prompts: list[list[int]], new: int, concurrency: int, seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        sampled = 0
        began = time.perf_counter()
        for wave in waves(prompts, concurrency):
            ids = torch.tensor(wave)
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                pad_token_id=0,
            )
            sampled += out[:, ids.shape[1] :].numel()
        seconds = time.perf_counter() - began
        expect(sampled, new * len(prompts))
        return {"seconds": seconds}

    serve(given, {"run": run})


if __name__ == "__main__":
    main()
