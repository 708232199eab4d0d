"""Reports: numbers arrive computed, these modules only show them."""
