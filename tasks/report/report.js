(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const touch = matchMedia("(pointer: coarse)").matches;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const config = { responsive: true, displaylogo: false, displayModeBar: false };

  function template() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const axis = {
      gridcolor: colour("--grid"), linecolor: colour("--line"), zerolinecolor: colour("--line"),
      automargin: true, nticks: 8, ticks: "outside", ticklen: 5, tickcolor: "rgba(0,0,0,0)",
      tickfont: { color: colour("--muted") },
      title: { standoff: 8, font: { color: colour("--muted"), size: 12 } },
    };
    return {
      layout: {
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
        font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("--ink") },
        colorway: [colour("--ink")],
        margin: { l: 48, r: 16, t: 12, b: 40 },
        xaxis: { ...axis, showgrid: false, zeroline: false }, yaxis: axis,
        legend: { orientation: "h", x: 0, y: 1.02, xanchor: "left", yanchor: "bottom", traceorder: "normal" },
        hoverlabel: {
          bgcolor: colour("--card"), bordercolor: colour("--line"), font: { color: colour("--ink") },
        },
        // On a touch screen a drag scrolls the page.
        dragmode: touch ? false : "zoom",
      },
    };
  }

  function draw() {
    const look = template();
    for (const [name, figure] of Object.entries(figures)) {
      const element = document.getElementById(name);
      if (name === "timeline") {
        element.style.height = `${110 + 48 * figure.layout.yaxis.categoryarray.length}px`;
      }
      Plotly.react(element, figure.data, { ...figure.layout, template: look, uirevision: "kept" }, config);
    }
  }

  draw();
  dark.addEventListener("change", draw);

  const buttons = document.getElementById("timeline-buttons");
  if (buttons) {
    const ranges = figures.timeline.layout.meta;
    buttons.addEventListener("click", (event) => {
      const range = ranges[event.target.dataset.range];
      if (range) Plotly.relayout("timeline", { "xaxis.range": [...range] });
    });
  }
})();
