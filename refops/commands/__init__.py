"""The commands that have modules of their own: `refops check`, `refops golden`, and what commands share."""
