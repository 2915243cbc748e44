"""What the `refops` command shows: other modules measure, check and read tensors; nothing here does.

report.py inspect.py explain.py formats.py    text and JSON, one file a command
survey.py                                     SQNR of many tensors, for report and inspect
plot.py                                       the picture of `refops inspect --plot`
console.py numbers.py                         what they share: tables, progress, JSON; numbers in few characters
"""
