"""SimCSE: two forwards of a sentence, or entailed and contradicting sentences, against the batch."""
