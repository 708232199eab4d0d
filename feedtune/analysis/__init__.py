"""Pure analysis: records in, records out; opens no file, reads no clock, starts no process."""
