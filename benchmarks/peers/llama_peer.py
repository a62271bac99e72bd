"""llama.cpp as a peer, through llama-cpp-python's low-level calls: one batch of many sequences.

Each sequence has a stream of the cache of its own. Equal prompts are computed once and their cache
is copied. Its own sampler draws, at temperature 1.
"""

import time
from typing import Any

# Installed for the peer's Python only.
import llama_cpp as llama  # pyright: ignore[reportMissingImports]
from lines import expect, options, serve, waves


class Batch:
    """A context with room for `sequences` of `tokens` each."""

    def __init__(self, model: Any, sequences: int, tokens: int, threads: int) -> None:
        params = llama.llama_context_default_params()
        params.n_seq_max = sequences
        # Streams have a multiple of 256 cells.
        params.n_ctx = sequences * (-(-tokens // 256) * 256)
        params.n_batch = params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = threads
        self.context = llama.llama_init_from_model(model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp has no context of {params.n_ctx} tokens")
        self._memory = llama.llama_get_memory(self.context)
        self._batch = llama.llama_batch_init(params.n_batch, 0, 1)
        self._size = params.n_batch
        self._first: list[int] = []

    def begin(self, prompts: list[list[int]]) -> None:
        """Compute the prompts but for their last tokens, equal ones once."""
        first = prompts[0]
        if first == self._first:
            # Of the last wave's: what followed the prompt goes.
            llama.llama_memory_seq_rm(self._memory, 0, len(first) - 1, -1)
            for sequence in range(1, len(prompts)):
                llama.llama_memory_seq_rm(self._memory, sequence, -1, -1)
        else:
            llama.llama_memory_clear(self._memory, False)
        fresh = {
            sequence: prompt
            for sequence, prompt in enumerate(prompts)
            if prompt != (first if sequence else self._first)
        }
        rows = [
            (token, position, sequence, False)
            for sequence, prompt in fresh.items()
            for position, token in enumerate(prompt[:-1])
        ]
        for at in range(0, len(rows), self._size):
            self._decode(rows[at : at + self._size])
        for sequence in range(1, len(prompts)):
            if sequence not in fresh:
                llama.llama_memory_seq_cp(self._memory, 0, sequence, -1, -1)
        self._first = first

    def step(self, ids: list[int], position: int, sampler: Any) -> list[int]:
        """The next token of every sequence."""
        self._decode([(i, position, sequence, True) for sequence, i in enumerate(ids)])
        sample = llama.llama_sampler_sample
        return [sample(sampler, self.context, row) for row in range(len(ids))]

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        batch = self._batch
        batch.n_tokens = len(rows)
        for row, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[row] = token
            batch.pos[row] = position
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = sequence
            batch.logits[row] = wanted
        status = llama.llama_decode(self.context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")


def main() -> None:
    given = options()
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(
        given["gguf"].encode(), llama.llama_model_default_params()
    )
    if not model:
        raise SystemExit(f"llama.cpp cannot load {given['gguf']}")
    contexts: dict[tuple[int, int], Batch] = {}

    def context_of(sequences: int, tokens: int) -> Batch:
        key = sequences, -(-tokens // 256)
        if key not in contexts:
            contexts[key] = Batch(model, sequences, tokens, given["threads"])
        return contexts[key]

    def run(prompts: list[list[int]], new: int, concurrency: int, seed: int) -> dict[str, Any]:
        batch = context_of(concurrency, len(prompts[0]) + new)
        sampler = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
        llama.llama_sampler_chain_add(sampler, llama.llama_sampler_init_dist(seed))
        sampled = 0
        began = time.perf_counter()
        for wave in waves(prompts, concurrency):
            batch.begin(wave)
            ids = [prompt[-1] for prompt in wave]
            for step in range(new):
                ids = batch.step(ids, len(wave[0]) - 1 + step, sampler)
                sampled += len(ids)
        seconds = time.perf_counter() - began
        llama.llama_sampler_free(sampler)
        expect(sampled, new * len(prompts))
        return {"seconds": seconds}

    serve(given, {"run": run})


if __name__ == "__main__":
    main()
