"""Random small file trees for terminal problems.

The vocabulary is small and common on purpose: a model of two million parameters must learn to copy
these names within minutes. No content word is part of another word, file name or folder name, so
that substring search and word search agree.
"""

from collections.abc import Collection, Iterable
from random import Random

from headrace.sandbox.types import FileEntry

# fmt: off
WORDS = (
    "apple", "banana", "river", "stone", "cloud", "tiger", "piano", "lemon", "forest", "candle",
    "rocket", "garden", "silver", "window", "bridge", "butter", "monkey", "purple", "castle",
    "dragon", "engine", "flower", "hammer", "island", "jacket", "kitten", "ladder", "mirror",
    "needle", "orange", "pepper", "rabbit", "saddle", "turtle", "violet", "yellow",
)
STEMS = (
    "notes", "data", "report", "list", "plan", "users", "menu", "book", "mail", "todo", "index",
    "table", "draft", "memo",
)
# fmt: on
EXTENSIONS = ("txt", "log", "csv")
# fmt: off
FOLDERS = (
    "docs", "src", "home", "desk", "temp", "backup", "store", "photos", "music", "games",
)
# fmt: on

FILE_MODE = 0o644
FOLDER_MODE = 0o755

_LINES = {1: (4, 15), 2: (6, 25), 3: (10, 40)}
_DISTRACTORS = {1: (1, 2), 2: (3, 4), 3: (4, 6)}


class Tree:
    """A work folder under construction.

    Attributes:
        rng: every draw comes from here.
        level: 1 to 3; sets sizes, the length of names and the number of distractors.
        files: what was written so far, by relative path.
    """

    def __init__(self, rng: Random, level: int) -> None:
        self.rng = rng
        self.level = level
        self.files: dict[str, FileEntry] = {}
        self._names: set[str] = set()
        self._folders: set[str] = set()

    def name(self, extension: str | None = None) -> str:
        """A file name not drawn before."""
        for _ in range(1000):
            stem = self.rng.choice(STEMS)
            if self.level == 3 and self.rng.random() < 0.5:
                stem += str(self.rng.randint(1, 9))
            name = f"{stem}.{extension or self.rng.choice(EXTENSIONS)}"
            if name not in self._names:
                self._names.add(name)
                return name
        raise RuntimeError("terminal tasks: the pool of file names is exhausted")

    def folder(self, parent: str = "") -> str:
        """Make a folder whose name was not drawn before; returns its path."""
        name = self.rng.choice([f for f in FOLDERS if f not in self._folders])
        self._folders.add(name)
        path = f"{parent}/{name}" if parent else name
        self.files[path] = FileEntry("dir", FOLDER_MODE)
        return path

    def word(self, avoid: Collection[str] = ()) -> str:
        """A content word."""
        return self.rng.choice([w for w in WORDS if w not in avoid])

    def words(self, count: int, avoid: Collection[str] = ()) -> list[str]:
        """Distinct content words."""
        return self.rng.sample([w for w in WORDS if w not in avoid], count)

    def size(self) -> int:
        """A number of lines suited to the level."""
        return self.rng.randint(*_LINES[self.level])

    def lines(self, count: int, avoid: Collection[str] = (), most: int = 3) -> list[str]:
        """`count` lines of one to `most` content words, none of `avoid` among them."""
        pool = [w for w in WORDS if w not in avoid] if avoid else WORDS
        rng = self.rng
        return [" ".join(rng.choices(pool, k=rng.randint(1, most))) for _ in range(count)]

    def write(self, path: str, lines: Iterable[str], mode: int = FILE_MODE) -> None:
        """Put a text file into the tree."""
        data = "".join(line + "\n" for line in lines).encode()
        self.files[path] = FileEntry("file", mode, data)

    def add_distractors(
        self, avoid: Collection[str] = (), *, like: str | None = None, folders: bool = False
    ) -> None:
        """Files that have nothing to do with the problem.

        Args:
            avoid: words that must not occur in them.
            like: from level 2 on one of them shares this file's stem.
            folders: from level 2 on there may also be a folder with files in it.
        """
        for _ in range(self.rng.randint(*_DISTRACTORS[self.level])):
            self.write(self.name(), self.lines(self.rng.randint(1, 6), avoid))
        if self.level == 1:
            return
        if like is not None:
            stem = like.rsplit(".", 1)[0]
            twins = [n for e in EXTENSIONS if (n := f"{stem}.{e}") not in self._names]
            if twins:
                twin = self.rng.choice(twins)
                self._names.add(twin)
                self.write(twin, self.lines(self.rng.randint(1, 6), avoid))
        if folders:
            folder = self.folder()
            for _ in range(self.level - 1):
                self.write(f"{folder}/{self.name()}", self.lines(self.rng.randint(1, 4), avoid))

    def expect(
        self, *, remove: Collection[str] = (), write: dict[str, FileEntry] | None = None
    ) -> dict[str, FileEntry]:
        """The tree as it should be after removing and writing these paths."""
        kept = {path: entry for path, entry in self.files.items() if path not in remove}
        return kept | (write or {})


def text_entry(lines: Iterable[str], mode: int = FILE_MODE) -> FileEntry:
    """A text file of these lines."""
    return FileEntry("file", mode, "".join(line + "\n" for line in lines).encode())
