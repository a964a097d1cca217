"""Published Hugging Face folders into checkpoints: compared with settings, streamed, and tried whole."""
