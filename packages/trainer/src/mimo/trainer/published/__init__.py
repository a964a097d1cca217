"""What published Hugging Face folders hold, and which plugins read them: for those that import and that export."""
