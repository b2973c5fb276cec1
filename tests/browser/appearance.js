// What cannot be read, seen or told of the elements of a page; see appearance.py.
([selector, least, leastLarge]) => {
    const found = [], roots = [...document.querySelectorAll(selector)];
    if (!roots.some(root => root.checkVisibility())) return [`nothing of ${selector} can be seen`];
    const canvas = Object.assign(document.createElement('canvas'), {width: 1, height: 1});
    const ink = canvas.getContext('2d', {willReadFrequently: true}), known = {};
    const rgba = colour => known[colour] ??= (() => {
        ink.clearRect(0, 0, 1, 1);
        ink.fillStyle = colour;
        ink.fillRect(0, 0, 1, 1);
        const [r, g, b, a] = ink.getImageData(0, 0, 1, 1).data;
        return [r, g, b, a / 255];
    })();
    const over = (top, below) => [0, 1, 2].map(i => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
    const luminance = c => [0.2126, 0.7152, 0.0722].reduce((sum, w, i) => {
        const v = c[i] / 255;
        return sum + w * (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    }, 0);
    const contrast = (a, b) => {
        const [x, y] = [luminance(a), luminance(b)].sort((p, q) => q - p);
        return (x + 0.05) / (y + 0.05);
    };
    const parent = e => e.parentElement ?? e.getRootNode().host ?? null;
    const seen = e => e.checkVisibility({opacityProperty: true, visibilityProperty: true});
    const name = e => {
        const classes = [...e.classList].slice(0, 3).map(c => '.' + c).join('');
        return e.tagName.toLowerCase() + classes;
    };
    const short = text => JSON.stringify(text.trim().replace(/\s+/g, ' ').slice(0, 40));
    const told = (e, far = 4) => {  // whether what is cut off is told by the pointer
        for (let i = 0; e && i < far; i++, e = parent(e)) if (e.title) return true;
        return false;
    };
    const unseen = e => {  // for screen readers only
        for (; e; e = parent(e)) if (getComputedStyle(e).clipPath === 'inset(50%)') return true;
        return false;
    };
    const inactive = e => e.closest(':disabled,[aria-disabled=true],.lm-mod-disabled')
        || e.closest('.jupyter-widgets:not(.widget-box)')?.querySelector(':scope input:disabled,:scope > select:disabled');

    // what a text stands on: layers from the nearest to the first that hides all behind it; null if that is a picture
    const ground = (e, box) => {
        const layers = [], base = rgba(getComputedStyle(document.documentElement).colorScheme.includes('dark')
            && matchMedia('(prefers-color-scheme: dark)').matches ? '#121212' : '#fff');
        let opacity = 1;
        if (e instanceof SVGElement) {
            const svg = e.ownerSVGElement ?? e, x = box.x + box.width / 2, y = box.y + box.height / 2;
            for (const shape of [...svg.querySelectorAll('path,rect,circle,ellipse,polygon,image')].reverse()) {
                if (!(shape.compareDocumentPosition(e) & Node.DOCUMENT_POSITION_FOLLOWING) || !seen(shape)) continue;
                if (shape.closest('defs,clipPath,.wb-spot')) continue;
                const r = shape.getBoundingClientRect();
                if (x < r.left || x > r.right || y < r.top || y > r.bottom) continue;
                if (shape.tagName === 'image') return null;
                const style = getComputedStyle(shape), fill = style.fill;
                if (fill === 'none') continue;
                if (fill.startsWith('url')) return null;
                const at = new DOMPoint(x, y).matrixTransform(shape.getScreenCTM().inverse());
                if (!shape.isPointInFill(at)) continue;
                const layer = [...rgba(fill)];
                layer[3] *= Number(style.fillOpacity) * Number(style.opacity);
                layers.push(layer);
                if (layer[3] > 0.99) break;
            }
            e = svg;
        }
        for (; e && (layers.at(-1)?.[3] ?? 0) < 0.99; e = parent(e)) {
            const style = getComputedStyle(e);
            if (style.backgroundImage !== 'none' && style.backgroundImage !== '') return null;
            layers.push(rgba(style.backgroundColor));
        }
        return layers.reduceRight((below, layer) => over(layer, below), base);
    };
    const checkContrast = (e, text, box) => {
        if (inactive(e)) return;
        const style = getComputedStyle(e), behind = ground(e, box);
        if (!behind) return;
        const drawn = [...rgba(e instanceof SVGElement ? style.fill : style.color)];
        for (let up = e; up; up = parent(up)) drawn[3] *= Number(getComputedStyle(up).opacity);
        const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
        const words = /[\p{L}\p{N}]/u.test(text);  // squares and arrows are graphics
        const ratio = contrast(over(drawn, behind), behind), needed = large || !words ? leastLarge : least;
        if (ratio < needed) found.push(`contrast ${ratio.toFixed(2)}: ${name(e)} ${short(text)}`);
    };
    const checkCut = (e, text, box) => {
        for (let up = e; up && !roots.includes(up); up = parent(up)) {
            if (up instanceof SVGElement && up.ownerSVGElement) continue;
            const style = getComputedStyle(up), edge = up.getBoundingClientRect();
            if (['auto', 'scroll'].includes(style.overflowX) || ['auto', 'scroll'].includes(style.overflowY)) return;
            const sideways = style.overflowX !== 'visible' && (box.right > edge.right + 1.5 || box.left < edge.left - 1.5);
            const down = style.overflowY !== 'visible' && (box.bottom > edge.bottom + 4 || box.top < edge.top - 4);
            if ((sideways || down) && (!told(e) || e.closest('button'))) {  // what a button does is read, not hovered for
                found.push(`cut off by ${name(up)}: ${name(e)} ${short(text)}`);
                return;
            }
        }
    };
    const checkBroken = (e, node) => {  // a short word in the head of a table that goes on in the next line
        if (!e.closest('th')) return;
        for (const {0: word, index} of node.data.matchAll(/[^\s-]+/g)) {
            const range = document.createRange();
            range.setStart(node, index);
            range.setEnd(node, index + word.length);
            const lines = new Set([...range.getClientRects()].map(r => Math.round(r.top)));
            if (word.length <= 10 && lines.size > 1) found.push(`in pieces: ${name(e)} ${short(word)}`);
        }
    };
    const inside = '.cm-editor,script,style,noscript,template,title,desc,option,textarea';
    for (const root of roots) {
        const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
        while (walker.nextNode()) {
            const node = walker.currentNode, e = node.parentElement;
            if (!node.data.trim() || e.closest(inside) || !seen(e)) continue;
            const range = document.createRange();
            range.selectNodeContents(node);
            const box = range.getBoundingClientRect();
            if (box.width < 2 || box.height < 2 || unseen(e)) continue;
            checkContrast(e, node.data, box);
            checkCut(e, node.data, box);
            checkBroken(e, node);
        }
        const operated = 'button,input:not([type=hidden]),select,textarea,a[href],summary,[role=button],[role=tab]';
        const controls = [...root.querySelectorAll(operated)]
            .filter(e => seen(e) && e.getBoundingClientRect().width > 2);
        for (const e of controls) {
            const labels = [...(e.labels ?? [])].map(l => l.textContent).join('');
            const label = e.getAttribute('aria-label') || e.title || e.textContent.trim() || labels;
            const within = e.querySelector('img[alt]:not([alt=""])') || told(e, 2);
            if (!(label || '').trim() && !within) found.push(`no name: ${name(e)}`);
            if (e.tagName === 'SELECT' || (e.tagName === 'INPUT' && ['text', 'number', ''].includes(e.type))) {
                const text = e.tagName === 'SELECT' ? e.selectedOptions[0]?.text ?? '' : e.value, style = getComputedStyle(e);
                checkContrast(e, text, e.getBoundingClientRect());
                ink.font = style.font;
                const room = e.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
                const wide = ink.measureText(text).width, list = e.tagName === 'SELECT' && (e.multiple || e.size > 1);
                if (!list && wide > room + 1.5 && !told(e)) found.push(`cut off: ${name(e)} ${short(text)}`);
            }
        }
        const scrolled = (e, top) => {
            for (let up = parent(e); up && up !== parent(top); up = parent(up))
                if (['auto', 'scroll', 'hidden', 'clip'].includes(getComputedStyle(up).overflowX)) return true;
            return false;
        };
        for (let i = 0; i < controls.length; i++) for (let j = i + 1; j < controls.length; j++) {
            const [a, b] = [controls[i], controls[j]];
            if (a.contains(b) || b.contains(a) || a.closest('label')?.contains(b)) continue;
            const [p, q] = [a.getBoundingClientRect(), b.getBoundingClientRect()];
            const wide = Math.min(p.right, q.right) - Math.max(p.left, q.left);
            const high = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
            const both = `${name(a)} ${short(a.textContent)} and ${name(b)} ${short(b.textContent)}`;
            if (wide > 1.5 && high > 1.5) found.push(`on top of each other: ${both}`);
        }
        const edge = root === document.body ? innerWidth : root.getBoundingClientRect().right;
        for (const e of root.querySelectorAll('*')) {
            if (e instanceof SVGElement && e.ownerSVGElement) continue;
            const r = e.getBoundingClientRect();
            if (r.width && seen(e) && r.right > edge + 1.5 && !scrolled(e, root))
                found.push(`beyond the right edge by ${Math.round(r.right - edge)}: ${name(e)}`);
        }
        for (const img of root.querySelectorAll('img'))
            if (seen(img) && !img.alt && !['presentation', 'none'].includes(img.getAttribute('role')))
                found.push(`no words for a picture: ${name(img)}`);
        for (const svg of root.querySelectorAll('svg')) {
            const small = svg.getBoundingClientRect().width <= 40, inner = svg.parentElement.closest('svg');
            const words = svg.closest('[aria-hidden=true],[aria-label],[title]') || svg.querySelector(':scope > title');
            if (seen(svg) && !small && !inner && !words) found.push(`no words for a picture: ${name(svg)}`);
        }
    }
    const whole = document.documentElement.scrollWidth;
    if (whole > innerWidth) found.push(`the page is ${whole} wide, its window ${innerWidth}`);
    return [...new Set(found)];
}
