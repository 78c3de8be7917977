"""Text generation with Llama 2: the engine, and the functions that most people need."""

from __future__ import annotations

from model.loader import load_model as load

from .generate import chat_completion, generate, text_completion
from .sampling import sample_top_p
from .types import ChatPrediction, CompletionPrediction, Dialog, Message, Role

__all__ = [
    "ChatPrediction",
    "CompletionPrediction",
    "Dialog",
    "Message",
    "Role",
    "chat_completion",
    "generate",
    "load",
    "sample_top_p",
    "text_completion",
]
