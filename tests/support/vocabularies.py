"""Small Unigram and WordPiece tokenizers, as those of XLM-R and BERT are."""

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

MASK = AddedToken("<mask>", lstrip=True, special=True, normalized=False)
ROLES = {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>", "cls": "<s>", "sep": "</s>", "mask": "<mask>"}
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def unigram(texts, size, roles=ROLES, ends=True, before=()):
    """One whose tokens have these roles, with or without tokens around a text, after these splits of it."""
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    metaspace = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.pre_tokenizer = pre_tokenizers.Sequence([*before, metaspace]) if before else metaspace
    names = [name for name in ("<s>", "<pad>", "</s>", "<unk>") if ends or name in roles.values()]
    trainer = trainers.UnigramTrainer(
        vocab_size=size, special_tokens=[*names, MASK], unk_token="<unk>", show_progress=False, n_sub_iterations=1
    )
    backend.train_from_iterator(texts, trainer)
    if ends:
        around = [(token, backend.token_to_id(token)) for token in ("<s>", "</s>")]
        backend.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=around)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **{f"{role}_token": name for role, name in roles.items()})


def wordpiece(texts, size, **flags):
    """A cased or uncased one."""
    backend = wordpiece_backend(texts, size, **flags)
    around = [("[CLS]", 2), ("[SEP]", 3)]
    backend.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=around)
    roles = zip(("pad", "unk", "cls", "sep", "mask"), SPECIALS, strict=True)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **{f"{role}_token": name for role, name in roles})


def wordpiece_backend(texts, size, longest=100, **flags):
    """Its words have at most so many letters."""
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=longest))
    backend.normalizer = normalizers.BertNormalizer(**flags) if flags else None
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=size, show_progress=False, special_tokens=SPECIALS)
    backend.train_from_iterator(texts, trainer)
    return backend
