"""The reference back end: plain torch on any device, written to be read; what every other back end must equal."""
