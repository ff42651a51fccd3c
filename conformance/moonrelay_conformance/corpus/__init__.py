"""The corpus: payloads with their right outcomes, and lease scenarios, as versioned JSON."""
