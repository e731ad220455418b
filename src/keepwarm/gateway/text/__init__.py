"""Conversation to tokens and tokens to turn events. The door is `model`; the nouns are in `conversation`."""
