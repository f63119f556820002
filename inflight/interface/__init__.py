"""What crosses a boundary: data and ABCs only, and never torch."""
