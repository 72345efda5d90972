"""Durations in words."""


def duration(seconds: float) -> str:
    """Format a duration for people: `8 s`, `3 min`, `2 h 05 min`."""
    whole = round(seconds)
    if whole < 90:
        return f"{whole} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"
