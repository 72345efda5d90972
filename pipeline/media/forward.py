"""A sound file that libsndfile reads from its beginning to its end, without the seek after each block."""

import soundfile


class ForwardSound(soundfile.SoundFile):  # type: ignore[misc]
    """A `SoundFile` for reading forward: a FLAC file of unknown length (0 samples in its header) cannot seek."""

    def seekable(self) -> bool:
        """Returns False, so that `read` does not seek to where it is."""
        return False
