"""The live console: pages for operators, the stream that feeds them, and lessons on a real model."""
