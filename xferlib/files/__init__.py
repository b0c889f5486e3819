"""Files: `load` puts what they hold, `save` writes what is on the device."""
