"""A synthetic course in chat, thinking and tool use for a model of a few million parameters.

Text is simple and regular: few phrasings, answers copied from the question or from tool results,
numbers and words drawn at random, so that form can be learned within minutes and memory does not
help. Everything is a function of the seed. A question is held out or not by a hash of its words,
so no question of the evaluation is ever trained, alone or inside a longer conversation.
"""

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from headrace.data.chat import Conversation
from headrace.tokens.messages import Message
from headrace.tokens.thinking import ThinkingMode

_HELD_OUT_ONE_IN = 8
_SYSTEM = "You are a helpful assistant."


def _tool(name: str, description: str, required: dict[str, str], **optional: str) -> dict[str, Any]:
    types = {**required, **optional}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind} for key, kind in types.items()},
                "required": list(required),
            },
        },
    }


TOOLS: dict[str, dict[str, Any]] = {
    "calculator": _tool("calculator", "Compute.", {"expression": "string"}),
    "lookup": _tool("lookup", "Find a fact.", {"key": "string"}),
    "list_files": _tool("list_files", "List a folder.", {"path": "string"}),
    "read_file": _tool("read_file", "Read a file.", {"path": "string"}, lines="integer"),
}
"""Tools of the course, by name."""


def _list(words: str) -> tuple[str, ...]:
    return tuple(words.split())


_WORDS = _list(
    "apple bird boat book bread chair cloud coin door fish flag garden glass hat horse house key "
    "lamp leaf milk moon mountain paper pen plate rain ring river road salt ship shoe snow star "
    "stone sun table tea train tree wall wheel wind window"
)
_NAMES = _list("Ada Ben Cora Dan Eva Finn Gus Hana Ivo Jan Kim Lea Max Nora Otto Pia Rosa Tom")
_FOLDERS = _list("data docs home lib notes src test work")
_QUALITIES = _list("age color length owner price size weight")
_FACTS = {
    "grass": "green",
    "snow": "white",
    "coal": "black",
    "blood": "red",
    "the sky": "blue",
    "a lemon": "yellow",
    "a carrot": "orange",
    "chocolate": "brown",
    "milk": "white",
    "a frog": "green",
    "the sea": "blue",
    "a tomato": "red",
}
_OPERATIONS = {"plus": ("+", int.__add__), "minus": ("-", int.__sub__), "times": ("*", int.__mul__)}


class _Exchange(NamedTuple):
    """What a user asks and everything up to the answer; every assistant message has thinking."""

    messages: list[Message]
    tools: tuple[str, ...]


# ---------------------------------------------------------------- building blocks


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _answer(thinking: str, text: str) -> Message:
    return {"role": "assistant", "content": text, "reasoning_content": thinking}


def _call(thinking: str, *calls: tuple[str, dict[str, Any]], error: bool = False) -> Message:
    message: Message = {
        "role": "assistant",
        "content": "",
        "reasoning_content": thinking,
        "tool_calls": [
            {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for name, arguments in calls
        ],
    }
    return {**message, "error": True} if error else message


def _result(text: str, *, error: bool = False) -> Message:
    message: Message = {"role": "tool", "content": text}
    return {**message, "error": True} if error else message


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _file(rng: random.Random) -> str:
    return f"{rng.choice(_WORDS)}.{rng.choice(('txt', 'md'))}"


def _some_words(rng: random.Random, count: int) -> str:
    return " ".join(rng.sample(_WORDS, count))


# ---------------------------------------------------------------- talk without tools


def _greet(rng: random.Random) -> _Exchange:
    name, word = rng.choice(_NAMES), rng.choice(_WORDS)
    opening = rng.choice((f"Hello, I am {name}.", f"Hi, my name is {name}."))
    messages = [
        _user(f"{opening} I like the {word}."),
        _answer(f"The user is {name}. I say hello.", f"Hello {name}, how can I help?"),
    ]
    if rng.random() < 0.6:
        if rng.random() < 0.5:
            messages += [
                _user("What is my name?"),
                _answer(f"The user said the name {name}.", f"Your name is {name}."),
            ]
        else:
            messages += [
                _user("What do I like?"),
                _answer(f"The user said the {word}.", f"You like the {word}."),
            ]
    return _Exchange(messages, ())


def _pick(rng: random.Random) -> _Exchange:
    words = rng.sample(_WORDS, 3)
    place = rng.choice(("first", "last"))
    word = words[0] if place == "first" else words[-1]
    listed = ", ".join(words)
    question = rng.choice(
        (f"Which word is {place}: {listed}?", f"Here are three words: {listed}. Which is {place}?")
    )
    return _Exchange(
        [
            _user(question),
            _answer(f"The words are {listed}. The {place} is {word}.", f"The {place} is {word}."),
        ],
        (),
    )


def _repeat(rng: random.Random) -> _Exchange:
    text = _some_words(rng, rng.randint(2, 4))
    question = rng.choice((f"Repeat: {text}", f"Please say this again: {text}"))
    return _Exchange([_user(question), _answer(f"I repeat {text}.", text)], ())


def _fact(rng: random.Random) -> _Exchange:
    thing = rng.choice(list(_FACTS))
    question = rng.choice(
        (
            f"What color is {thing}?",
            f"Tell me the color of {thing}.",
            f"Which color has {thing}?",
            f"Do you know what color {thing} is?",
        )
    )
    color = _FACTS[thing]
    return _Exchange(
        [_user(question), _answer(f"{_sentence(thing)} is {color}.", f"The color is {color}.")], ()
    )


# ---------------------------------------------------------------- one call


def _calculate(rng: random.Random) -> _Exchange:
    word = rng.choice(list(_OPERATIONS))
    sign, operation = _OPERATIONS[word]
    a, b = rng.randint(2, 99), rng.randint(2, 99)
    result = operation(a, b)
    question = rng.choice((f"What is {a} {word} {b}?", f"Please compute {a} {word} {b}."))
    return _Exchange(
        [
            _user(question),
            _call(f"I compute {a} {sign} {b}.", ("calculator", {"expression": f"{a} {sign} {b}"})),
            _result(str(result)),
            _answer(f"The result is {result}.", f"{a} {word} {b} is {result}."),
        ],
        ("calculator",),
    )


def _value(rng: random.Random, quality: str) -> str:
    return rng.choice(_NAMES) if quality == "owner" else str(rng.randint(2, 999))


def _look_up(rng: random.Random) -> _Exchange:
    quality, thing = rng.choice(_QUALITIES), rng.choice(_WORDS)
    key = f"{quality} of the {thing}"
    question = rng.choice((f"What is the {key}?", f"Tell me the {key}."))
    messages = [_user(question), _call(f"I look up the {key}.", ("lookup", {"key": key}))]
    if rng.random() < 0.15:
        messages += [
            _result("error: not found"),
            _answer("The lookup found nothing.", f"I could not find the {key}."),
        ]
    else:
        value = _value(rng, quality)
        messages += [
            _result(value),
            _answer(f"The {quality} is {value}.", f"The {key} is {value}."),
        ]
    return _Exchange(messages, ("lookup",))


def _list_folder(rng: random.Random) -> _Exchange:
    folder = f"{rng.choice(_FOLDERS)}/{rng.choice(_WORDS)}"
    files = sorted({_file(rng) for _ in range(rng.randint(1, 3))})
    question = rng.choice((f"Which files are in {folder}?", f"List the folder {folder}."))
    listed = " ".join(files)
    return _Exchange(
        [
            _user(question),
            _call(f"I list {folder}.", ("list_files", {"path": folder})),
            _result(listed),
            _answer(f"The folder has {listed}.", f"The files are: {listed}"),
        ],
        ("list_files",),
    )


def _read(rng: random.Random) -> _Exchange:
    path = f"{rng.choice(_FOLDERS)}/{_file(rng)}"
    arguments: dict[str, Any] = {"path": path}
    if rng.random() < 0.4:
        arguments["lines"] = rng.randint(1, 9)
        question = f"Read {arguments['lines']} lines of {path}."
        thought = f"I read {arguments['lines']} lines of {path}."
    else:
        question = rng.choice((f"What does {path} say?", f"Read {path}."))
        thought = f"I read {path}."
    text = _some_words(rng, rng.randint(2, 3))
    return _Exchange(
        [
            _user(question),
            _call(thought, ("read_file", arguments)),
            _result(text),
            _answer(f"The file says {text}.", f"It says: {text}"),
        ],
        ("read_file",),
    )


# ---------------------------------------------------------------- several calls


def _find_and_read(rng: random.Random) -> _Exchange:
    folder = f"{rng.choice(_FOLDERS)}/{rng.choice(_WORDS)}"
    file = _file(rng)
    text = _some_words(rng, rng.randint(2, 3))
    question = rng.choice(
        (f"What does the file in {folder} say?", f"Find the file in {folder} and read it.")
    )
    return _Exchange(
        [
            _user(question),
            _call(f"I list {folder}.", ("list_files", {"path": folder})),
            _result(file),
            _call(f"The file is {file}. I read it.", ("read_file", {"path": f"{folder}/{file}"})),
            _result(text),
            _answer(f"The file says {text}.", f"It says: {text}"),
        ],
        ("list_files", "read_file"),
    )


def _add_up(rng: random.Random) -> _Exchange:
    quality = rng.choice(("length", "price", "weight"))
    first, second = rng.sample(_WORDS, 2)
    a, b = rng.randint(2, 99), rng.randint(2, 99)
    question = f"What is the {quality} of the {first} and the {second} together?"
    return _Exchange(
        [
            _user(question),
            _call(
                f"I look up the {first} and the {second}.",
                ("lookup", {"key": f"{quality} of the {first}"}),
                ("lookup", {"key": f"{quality} of the {second}"}),
            ),
            _result(str(a)),
            _result(str(b)),
            _call(f"I compute {a} + {b}.", ("calculator", {"expression": f"{a} + {b}"})),
            _result(str(a + b)),
            _answer(f"The result is {a + b}.", f"The {quality} together is {a + b}."),
        ],
        ("lookup", "calculator"),
    )


def _read_both(rng: random.Random) -> _Exchange:
    paths = [f"{rng.choice(_FOLDERS)}/{file}" for file in (_file(rng), _file(rng))]
    texts = rng.sample(_WORDS, 2)
    listed = " and ".join(paths)
    return _Exchange(
        [
            _user(f"Read {listed}."),
            _call(f"I read {listed}.", *(("read_file", {"path": path}) for path in paths)),
            *map(_result, texts),
            _answer(f"The files say {' and '.join(texts)}.", f"They say: {' and '.join(texts)}"),
        ],
        ("read_file",),
    )


def _try_again(rng: random.Random) -> _Exchange:
    """A wrong call, its error, and the right call. The wrong one is context, not an example."""
    folder, file = rng.choice(_FOLDERS), _file(rng)
    text = _some_words(rng, rng.randint(2, 3))
    path = f"{folder}/{file}"
    messages = [_user(f"What does {file} in the folder {folder} say?")]
    if rng.random() < 0.6:
        wrong = rng.choice((file, f"{rng.choice(_WORDS)}/{file}", f"{folder}/{rng.choice(_WORDS)}"))
        messages += [
            _call(f"I read {wrong}.", ("read_file", {"path": wrong}), error=True),
            _result("error: no such file", error=True),
            _call(f"The path was wrong. I read {path}.", ("read_file", {"path": path})),
        ]
    else:
        messages.append(_call(f"I read {path}.", ("read_file", {"path": path})))
    messages += [_result(text), _answer(f"The file says {text}.", f"It says: {text}")]
    return _Exchange(messages, ("read_file",))


_COURSE: dict[Callable[[random.Random], _Exchange], float] = {
    _greet: 2,
    _pick: 2,
    _repeat: 1.5,
    _fact: 1.5,
    _calculate: 2.5,
    _look_up: 2.5,
    _list_folder: 1.5,
    _read: 2.5,
    _find_and_read: 1.5,
    _add_up: 1.5,
    _read_both: 1,
    _try_again: 2,
}

# ---------------------------------------------------------------- conversations

_LENGTHS = {
    ThinkingMode.INTERLEAVED: (7, 3, 0, 0),
    ThinkingMode.PRESERVED: (1, 2, 2, 2),
    ThinkingMode.TURN: (3, 3, 1, 1),
}
"""How often a conversation has 1, 2, 3 or 4 exchanges. Where thinking is dropped each costs a
sequence of its own, so the long ones are those that keep it."""


def is_held_out(messages: Sequence[Message]) -> bool:
    """Whether what the user says in an exchange belongs to the evaluation."""
    said = "\n".join(message["content"] for message in messages if message["role"] == "user")
    digest = hashlib.blake2b(said.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % _HELD_OUT_ONE_IN == 0


def conversations(seed: int, count: int) -> list[Conversation]:
    """Training conversations; conversation i depends on `seed` and i only."""
    return [_conversation(f"{seed}:{i}", held_out=False) for i in range(count)]


def held_out(seed: int, count: int) -> list[Conversation]:
    """Conversations whose questions are never trained, whatever the seed."""
    return [_conversation(f"{seed}:{i}:held out", held_out=True) for i in range(count)]


def _conversation(key: str, *, held_out: bool) -> Conversation:
    rng = random.Random(key)
    mode = rng.choices(list(_LENGTHS), weights=(3, 4, 3))[0]
    count = rng.choices(range(1, 5), weights=_LENGTHS[mode])[0]
    exchanges = [_exchange(rng, held_out=held_out) for _ in range(count)]
    messages: list[Message] = []
    if rng.random() < 0.5:
        messages.append({"role": "system", "content": _SYSTEM})
    for exchange in exchanges:
        silent = mode is ThinkingMode.TURN and rng.random() < 0.5
        for message in exchange.messages:
            if silent and "reasoning_content" in message:
                message = {k: v for k, v in message.items() if k != "reasoning_content"}
            messages.append(message)
    return Conversation(_numbered(messages), _declared(rng, exchanges), mode)


def _exchange(rng: random.Random, *, held_out: bool) -> _Exchange:
    make = rng.choices(list(_COURSE), weights=list(_COURSE.values()))[0]
    while is_held_out((exchange := make(rng)).messages) is not held_out:
        pass
    return exchange


def _declared(rng: random.Random, exchanges: Sequence[_Exchange]) -> list[dict[str, Any]]:
    """The tools the conversation needs and sometimes another one, in any order."""
    names = sorted({name for exchange in exchanges for name in exchange.tools})
    spare = [name for name in TOOLS if name not in names]
    if spare and rng.random() < 0.25:
        names.append(rng.choice(spare))
    rng.shuffle(names)
    return [TOOLS[name] for name in names]


def _numbered(messages: list[Message]) -> list[Message]:
    """Give calls and their results ids that belong together."""
    waiting: list[str] = []
    made = 0
    numbered: list[Message] = []
    for message in messages:
        if "tool_calls" in message:
            ids = [f"call_{made + i}" for i in range(len(message["tool_calls"]))]
            made += len(ids)
            waiting = ids
            calls = zip(message["tool_calls"], ids, strict=True)
            message = {**message, "tool_calls": [{**call, "id": name} for call, name in calls]}
        elif message["role"] == "tool":
            message = {**message, "tool_call_id": waiting[0]}
            waiting = waiting[1:]
        numbered.append(message)
    return numbered
