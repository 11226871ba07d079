"""The harness around a training job: its context, its report, its live table and its picture."""
