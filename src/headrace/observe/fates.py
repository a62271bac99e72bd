"""What became of a session and its tokens, in words that every view uses."""

from headrace.rollout.records import SessionSummary


def version_words(version: int, newest: int) -> str:
    """What is known of a token's weights: "v4", or "v4..v6" where the engine told bounds alone."""
    return f"v{version}" if newest == version else f"v{version}..v{newest}"


def short_fate(session: SessionSummary) -> str:
    """The same in a word or two."""
    if session.step is not None:
        return f"update {session.step}"
    return "pending" if session.drop_reason is None else session.drop_reason.value


def fate_words(session: SessionSummary) -> str:
    """What became of the session's tokens, in words."""
    if session.step is not None:
        return f"trained in update {session.step}, advantage {session.advantage:+.3f}"
    if session.batch is not None:
        return f"cut into batch {session.batch}, not trained yet"
    if session.drop_reason is not None:
        return f"not trained: {session.drop_reason.value}"
    return "pending"
