// Texts that are shown with less contrast to what is behind them than WCAG's AA asks for, 4.5 to 1.
(() => {
  const channels = (colour) => (colour.match(/[\d.]+/g) ?? [0, 0, 0, 0]).map(Number);
  const over = ([r, g, b, a = 1], back) => [r, g, b].map((value, i) => value * a + back[i] * (1 - a));
  const light = (rgb) => rgb.map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4).reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => e ? over(channels(getComputedStyle(e).backgroundColor), behind(e.parentElement)) : [255, 255, 255];
  const faint = [];
  for (const e of document.querySelectorAll("body *")) {
    const hasText = [...e.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!hasText || !e.checkVisibility({visibilityProperty: true}) || e.closest("svg, [disabled], option, .sr, noscript")) continue;
    const back = behind(e), [one, other] = [light(over(channels(getComputedStyle(e).color), back)), light(back)].sort();
    const contrast = (other + 0.05) / (one + 0.05);
    if (contrast < 4.5) faint.push(`${contrast.toFixed(2)} ${e.outerHTML.slice(0, 100)}`);
  }
  return faint;
})()
