"""Checkpoints from and to published Hugging Face folders, and with their LoRA products merged."""
