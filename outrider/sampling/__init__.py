"""From logits to a token: settings, truncation, coupled noise."""
