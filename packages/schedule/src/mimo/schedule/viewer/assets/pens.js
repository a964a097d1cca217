// Two pens with one set of strokes: SVG, one rect a bar, and a canvas for plans of very many bars.

class SvgPen {
  constructor(plot) {
    this.svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    plot.append(this.svg);
  }
  begin(width, height) {
    this.svg.setAttribute("width", width);
    this.svg.setAttribute("height", height);
    this.parts = [`<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">` +
      `<rect width="2.2" height="6" fill="${theme.stripe}" fill-opacity=".55"/></pattern></defs>`];
  }
  bar(x, y, width, height, fill, hatch) {
    const place = `x="${x.toFixed(2)}" y="${y}" width="${width.toFixed(2)}" height="${height}" rx="${Math.min(2, width / 4).toFixed(1)}"`;
    this.parts.push(`<rect class="bar" ${place} fill="${fill}"/>`);
    if (hatch) this.parts.push(`<rect ${place} fill="url(#hatch)"/>`);
  }
  rect(x, y, width, height, fill, opacity = 1) {
    this.parts.push(`<rect shape-rendering="crispEdges" x="${x.toFixed(2)}" y="${y.toFixed(2)}" width="${width.toFixed(2)}" height="${height.toFixed(2)}" fill="${fill}" opacity="${opacity}"/>`);
  }
  line(x1, y1, x2, y2, stroke, opacity = 1, width = 1) {
    this.parts.push(`<line x1="${x1.toFixed(2)}" y1="${y1}" x2="${x2.toFixed(2)}" y2="${y2}" stroke="${stroke}" stroke-width="${width}" opacity="${opacity}"/>`);
  }
  text(x, y, text, fill) {
    this.parts.push(`<text x="${x.toFixed(1)}" y="${y}" fill="${fill}">${escaped(text)}</text>`);
  }
  end() {
    this.svg.innerHTML = this.parts.join("");
  }
}

class CanvasPen {
  constructor(plot) {
    this.canvas = element("canvas");
    plot.append(this.canvas);
  }
  begin(width, height) {
    const scale = window.devicePixelRatio || 1;
    Object.assign(this.canvas, { width: width * scale, height: height * scale });
    Object.assign(this.canvas.style, { width: `${width}px`, height: `${height}px` });
    this.pen = this.canvas.getContext("2d");
    this.pen.scale(scale, scale);
    this.pen.textAlign = "center";
    this.pen.font = "11px system-ui, sans-serif";
  }
  bar(x, y, width, height, fill, hatch) {
    this.rect(x, y, Math.max(width, 0.5), height, fill);
    if (hatch) for (let at = 3; at < width; at += 6) this.rect(x + at, y, 2, height, theme.stripe, 0.5);
  }
  rect(x, y, width, height, fill, opacity = 1) {
    this.pen.globalAlpha = opacity;
    this.pen.fillStyle = fill;
    this.pen.fillRect(x, y, width, height);
  }
  line(x1, y1, x2, y2, stroke, opacity = 1, width = 1) {
    Object.assign(this.pen, { globalAlpha: opacity, strokeStyle: stroke, lineWidth: width });
    this.pen.beginPath();
    this.pen.moveTo(x1, y1);
    this.pen.lineTo(x2, y2);
    this.pen.stroke();
  }
  text(x, y, text, fill) {
    this.pen.globalAlpha = 1;
    this.pen.fillStyle = fill;
    this.pen.fillText(text, x, y);
  }
  end() {}
}
