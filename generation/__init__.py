"""Text generation with Llama 2: the engine, and the functions that most people need."""

from __future__ import annotations

from generation.generate import chat_completion, generate, text_completion
from generation.interface import ChatPrediction, CompletionPrediction, Dialog, Message, Role
from generation.sampling import sample_top_p
from model.loader import load_model as load

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
