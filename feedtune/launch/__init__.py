"""Start the user's command under guard: the guardian process and the write guard."""
