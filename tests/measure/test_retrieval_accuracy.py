"""Retrieval accuracy counts exactly what greedy decoding, token by token, gets right."""

import re
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from headrace.data.retrieval import RetrievalWriter
from headrace.measure.retrieval import retrieval_accuracy
from headrace.model.causal import CausalAttend
from headrace.model.decoder import Decoder
from headrace.tokens.tokenizer import TextTokenizer


class Reader:
    """Looks facts up in the text of the tokens it has read, and is sometimes wrong.

    Stands in for a model: a token's "hidden state" is the id that it predicts.
    """

    def __init__(self, tokenizer: TextTokenizer, fails: int) -> None:
        self.tokenizer = tokenizer
        self.fails = fails
        self.config = SimpleNamespace(vocab_size=tokenizer.vocab_size)

    def next_id(self, read: list[int]) -> int:
        text = self.tokenizer.decode(read)
        asked = re.search(r"What is the value of ([A-Z]+)\? (\d*)$", text)
        if asked is None:
            return 0
        fact = re.search(rf"The value of {asked[1]} is (\d+)\.", text)
        if fact is None or len(asked[2]) >= len(fact[1]):
            return 0
        digit = int(fact[1][len(asked[2])])
        # Depends on the key and the digit's place only, so a wrong digit is wrong every time.
        if (sum(map(ord, asked[1])) + len(asked[2])) % self.fails == 0:
            digit = (digit + 1) % 10
        return self.tokenizer.encode_text(str(digit))[0]

    def __call__(self, ids: Tensor, positions: Tensor, attend: CausalAttend) -> Tensor:
        begins = (positions[0] == 0).nonzero().flatten().tolist()
        ends = [*begins[1:], ids.shape[1]]
        tokens = ids[0].tolist()
        guesses = [
            self.next_id(tokens[begin : t + 1])
            for begin, end in zip(begins, ends, strict=True)
            for t in range(begin, end)
        ]
        return torch.tensor(guesses)[None, :, None]

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(hidden[..., 0], self.config.vocab_size).float()


@pytest.mark.parametrize("prefix", [[], [2, 3]])
@pytest.mark.parametrize(("keys", "fails"), [(1, 7), (3, 5), (2, 10_000)])
def test_counts_what_a_greedy_loop_gets_right(tokenizer, prefix, keys, fails):
    writer = RetrievalWriter(tokenizer)
    reader = Reader(tokenizer, fails)
    length, examples = 160, 12
    right = 0
    for i in range(examples):
        example = writer.example(
            3 + i,
            length - len(prefix),
            keys,
            split="held_out",
            depth=(i + 0.5) / examples,
        )
        read = [*prefix, *example.ids.tolist()[: example.answer_start]]
        written = []
        for _ in example.answer_ids:
            written.append(reader.next_id([*read, *written]))
        right += written == example.answer_ids.tolist()
    score = retrieval_accuracy(
        reader,  # type: ignore[arg-type]  # a stand-in for a decoder
        writer,
        length=length,
        keys=keys,
        examples=examples,
        seed=3,
        prefix=prefix,
    )
    assert score == (length, keys, right, examples)
    assert right == examples if fails == 10_000 else 0 < right < examples


@pytest.mark.parametrize("mode", ["auto", "dense"])
def test_a_decoder_scores_as_its_own_greedy_continuations(
    model: Decoder, tokenizer: TextTokenizer, mode
):
    """Answers of one digit, so that even random weights are right sometimes."""
    writer = RetrievalWriter(tokenizer, value_digits=1)
    digits = [tokenizer.encode_text(str(d))[0] for d in range(10)]
    # Only digits are ever likely: one example in about ten is right by chance.
    weight = model.output_weight.data
    rest = torch.ones(len(weight), dtype=torch.bool)
    rest[digits] = False
    weight[rest] *= 1e-3
    length, examples = 96, 40
    right = 0
    for i in range(examples):
        example = writer.example(i, length - 1, 2, split="held_out", depth=(i + 0.5) / examples)
        prompt = torch.tensor([[2, *example.ids.tolist()[: example.answer_start]]])
        with torch.no_grad():
            attend = CausalAttend(None, mode)
            guess = int(model.logits(model(prompt, None, attend))[0, -1].argmax())
        right += guess == example.answer_ids[0]
    score = retrieval_accuracy(
        model, writer, length=length, keys=2, examples=examples, prefix=[2], mode=mode
    )
    assert score.right == right
    assert 0 < right < examples
