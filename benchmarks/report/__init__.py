"""Tables in Markdown and plots of all the results."""
