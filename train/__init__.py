"""Makes the embedded checkpoint: corpus, vocabulary, training, evaluation. See README.md."""
