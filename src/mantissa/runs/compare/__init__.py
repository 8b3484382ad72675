"""Several runs side by side: data, statistics, plots, words and the page."""
