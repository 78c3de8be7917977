"""Texts for comparing tokenizers: a list made by hand, and as many more as wanted from a seed."""

# ruff: noqa: RUF001 (letters that look alike are wanted here)
from __future__ import annotations

import random

BY_HAND = [
    "",
    " ",
    "  ",
    "\n",
    "\n\n\n",
    "\t",
    " \n \n",
    "\r\n",
    "a",
    " a",
    "a ",
    "  a  ",
    "Hello world!",
    "Hello  world!   Three spaces.",
    "line\n\nbreaks\r\n\ttab",
    "trailing \n",
    "I'm, you're, we'll, they'd, it's, don't, I'VE, WE'LL",
    "1234567890 12 3 4567 3.14159 1,000,000 -5 1e-10 0x1F",
    "٠١٢٣٤ १२३४ １２３４ ²³ Ⅷ",
    "def add(a: int, b: int) -> int:\n    return a + b\n\n\nprint(add(1, 2))\n",
    "for (int i = 0; i < n; ++i) {\n\t\tx[i] *= 2;\n\t}",
    '<html><body class="a">&amp; &nbsp;</body></html>',
    "SELECT * FROM t WHERE a != 'b' -- comment",
    "https://example.com/a?b=c&d=%20#frag",
    "user@example.com C:\\Windows\\System32 /usr/lib/x86_64",
    "你好，世界！今天天气很好。",
    "日本語のテキスト、カタカナとひらがな。",
    "한국어 문장입니다.",
    "Привет, мир! Ёлка.",
    "مرحبا بالعالم",
    "שלום עולם",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "naïve café Straße Æsir œuvre",
    "nai\u0308ve cafe\u0301",
    "🙂",
    "🙂🙃 👩‍👩‍👧 🏳️‍🌈 👍🏽 🇫🇷",
    "∑∫√≠≤≥ αβγ → ⇒ ±×÷",
    "▁ already ▁▁ there",
    "Ġ Ċ byte-level letters",
    "nul \x00 byte, bell \x07, escape \x1b[0m, delete \x7f",
    "\ufeffbyte order mark",
    "zero\u200bwidth\u200dand\u00a0no-break\u3000wide",
    "\U0001f9ff\U00020000\U0010ffff",
    "#$%&'()*+,-./:;<=>?@[\\]^_`{|}~",
    "!!!??...---===",
    "$a+b= x^2 ~ |y|",
    "<0x41> <0x0A>",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "ababababab   bababa",
    "UPPER lower MiXeD camelCase snake_case kebab-case",
    "    \n        indented\n\n    again",
]

_WORD_LIST = (
    "the of and a to in is you that it he was for on are as with his they at be this have from or one had by word but "
    "not what all were we when your can said there use an each which she do how their if will up other about out many "
    "return def class import self None True lambda async yield println public static void const let function i+=1 "
    "x==y a[0] {} () => != /* */ // # foo_bar fooBar FOO 'quoted' \"double\" 1st 2nd 100% $5.00 e.g. i.e. etc."
)
_WORDS = _WORD_LIST.split()
_RANGES = [
    (0x20, 0x7E),
    (0xA0, 0x17F),
    (0x370, 0x3FF),
    (0x400, 0x4FF),
    (0x590, 0x5FF),
    (0x600, 0x6FF),
    (0x900, 0x97F),
    (0xE00, 0xE7F),
    (0x2000, 0x206F),
    (0x2190, 0x22FF),
    (0x3040, 0x30FF),
    (0x4E00, 0x9FFF),
    (0xAC00, 0xD7A3),
    (0x1F300, 0x1F6FF),
    (0x1F900, 0x1F9FF),
    (0x20000, 0x2A6DF),
]
_SPACES = [" ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", " \n", "\n    ", "        ", "\u00a0", "\u3000"]


def texts(count: int = 2000, seed: int = 0) -> list[str]:
    """`count` texts: those made by hand, then random ones of words, digits, code, spaces and many scripts.

    None holds a lone surrogate; all are the same for the same arguments.
    """
    rng = random.Random(seed)
    return BY_HAND + [_random_text(rng) for _ in range(count - len(BY_HAND))]


def _random_text(rng: random.Random) -> str:
    parts = []
    for _ in range(rng.randrange(1, 14)):
        parts.append(rng.choice((_word, _word, _number, _script, _character, _space))(rng))
        if rng.random() < 0.6:
            parts.append(" ")
    return "".join(parts)


def _word(rng: random.Random) -> str:
    word = rng.choice(_WORDS)
    return rng.choice((word, word, word.upper(), word.capitalize(), word + rng.choice(".,;:!?")))


def _number(rng: random.Random) -> str:
    return "".join(rng.choice("0123456789") for _ in range(rng.randrange(1, 9)))


def _script(rng: random.Random) -> str:
    first, last = rng.choice(_RANGES)
    return "".join(chr(rng.randint(first, last)) for _ in range(rng.randrange(1, 9)))


def _character(rng: random.Random) -> str:
    code = rng.randrange(0x110000 - 0x800)
    return chr(code if code < 0xD800 else code + 0x800)  # no surrogates


def _space(rng: random.Random) -> str:
    return rng.choice(_SPACES)
